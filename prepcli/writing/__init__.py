"""Outputs: how each kind is laid out, staged, shared by processes, published and uploaded."""
