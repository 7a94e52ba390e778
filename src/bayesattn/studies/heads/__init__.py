"""What each head does: its prior, its attention on a text, and the keys that it needs."""
