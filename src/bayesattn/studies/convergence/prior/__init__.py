"""What a prior over distance does to convergence."""
