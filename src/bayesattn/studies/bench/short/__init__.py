"""Attention of short contexts, as training has them, against plain SDPA."""
