"""Read, permute, cast, digest and write tensors within a memory budget. Independent of models and formats."""
