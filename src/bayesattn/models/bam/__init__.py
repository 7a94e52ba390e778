"""The published model and the positional encodings it is compared with."""
