"""Token-sample complexity: how fast attention over n tokens comes near to attention over all there could be."""
