"""Errors, texts, JSON values, progress and processes: what all other packages share. No files of a checkpoint."""
