"""Models of Bayesian attention for Hugging Face transformers, and how any causal model is loaded."""
