"""Bayesian attention in models of Hugging Face transformers that were made without it."""
