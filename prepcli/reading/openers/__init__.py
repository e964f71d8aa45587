"""How checkpoints of each format become a Source: one module a format."""
