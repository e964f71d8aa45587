"""Model architectures, training and generation in JAX. Independent of prepcli."""
