"""Training data: files become a token store, the store becomes blocks, and a batch is a function of the step."""
