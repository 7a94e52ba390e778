"""Attention with a prior against its peers."""
