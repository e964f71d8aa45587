"""Fill arrays from a checkpoint and check the bytes read."""
