"""Pure descriptions of models: architectures, parameters and their place in checkpoints. No jax."""
