"""What the heads of a model learned, by training step."""
