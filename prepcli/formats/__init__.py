"""Bytes on disk: one module per file format."""
