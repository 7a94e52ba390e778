"""What training and reading cost: FLOPs, memory, time."""
