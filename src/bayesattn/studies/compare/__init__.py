"""Results of several models side by side."""
