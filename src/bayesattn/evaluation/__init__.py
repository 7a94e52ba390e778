"""How far a model really reads."""
