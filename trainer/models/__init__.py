"""Pure descriptions of models: architectures, parameters and where each one lies in a checkpoint. No jax."""
