"""Long contexts with pruned attention and the pruning cache."""
