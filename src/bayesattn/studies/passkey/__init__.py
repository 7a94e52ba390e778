"""Pass-key retrieval: keys hidden at any depth of prompts of any length."""
