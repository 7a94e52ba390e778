"""Perplexity with growing context."""
