"""What models read: text, tokens, and documents with something to retrieve."""
