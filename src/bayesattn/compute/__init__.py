"""What training and inference cost: FLOPs, memory, time."""
