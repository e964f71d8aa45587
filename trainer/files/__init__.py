"""Open and write files whose names or folders are not trusted."""
