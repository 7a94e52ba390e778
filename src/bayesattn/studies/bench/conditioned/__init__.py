"""Attention with priors that depend on the query against its peers."""
