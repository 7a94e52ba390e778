"""How much context each head of a model uses."""
