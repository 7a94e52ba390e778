"""Attention and training while another process computes."""
