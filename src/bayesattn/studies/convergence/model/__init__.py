"""Convergence in the layers of a real transformer."""
