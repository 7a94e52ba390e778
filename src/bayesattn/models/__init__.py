"""Models made of Bayesian attention, for Hugging Face transformers."""
