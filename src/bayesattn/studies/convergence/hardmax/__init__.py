"""Convergence as the temperature goes to zero."""
