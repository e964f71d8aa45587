"""There so that pytest imports the package first, once for all of its processes, and what they compile is shared."""
