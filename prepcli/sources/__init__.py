"""From the name of a checkpoint to a `Source`: its tensors and their byte ranges."""
