"""Read-only views of a checkpoint: name tree, tensor statistics, shard map."""
