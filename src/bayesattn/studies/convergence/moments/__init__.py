"""Convergence of the mean and covariance of attention outputs, for several laws of tokens."""
