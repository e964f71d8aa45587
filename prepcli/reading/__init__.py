"""From what a user calls a checkpoint to its tensors, wherever and in whichever format they are stored."""
