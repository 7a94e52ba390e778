"""What a model loses when its cache keeps a share of its bytes."""
