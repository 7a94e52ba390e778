"""Windows for the heads of a pretrained model, by what they cost."""
