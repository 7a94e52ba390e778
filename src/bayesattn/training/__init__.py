"""Recipes and the trainer that follows them."""
