"""What long contexts cost in training."""
