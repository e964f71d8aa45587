"""The training loop: step, optimizer, checkpoints and metrics."""
