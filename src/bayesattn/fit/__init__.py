"""Spans that the heads of a pretrained model already have, as priors that bound its cache."""
