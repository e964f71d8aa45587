"""Checkpoints on the Hugging Face hub and in object stores, read by byte range."""
