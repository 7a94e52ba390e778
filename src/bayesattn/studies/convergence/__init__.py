"""Token-sample complexity: how fast attention over n tokens converges to its limit as n grows."""
