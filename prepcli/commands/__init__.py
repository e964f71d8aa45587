"""One module per command, from a typed request to a result."""
