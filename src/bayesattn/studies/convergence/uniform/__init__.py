"""Convergence of the largest error over a ball of queries."""
