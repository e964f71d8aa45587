"""Training and generation in JAX, on the models and checkpoints of prepcli."""
