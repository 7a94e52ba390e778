"""Ways to read past the training length without training, side by side."""
