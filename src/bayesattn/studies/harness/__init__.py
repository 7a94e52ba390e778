"""Tasks of lm-eval."""
