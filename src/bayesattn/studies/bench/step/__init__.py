"""One token at a time, of one layer and of whole models."""
