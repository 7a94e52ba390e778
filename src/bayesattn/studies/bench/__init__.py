"""Side by side with peers in one process; ratios are reported only where results agreed in the same run."""
