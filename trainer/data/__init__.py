"""Training data: tokenize text files, pack tokens, and compute each batch from the step number."""
