"""Plans of a training step from shapes alone: memory, floating-point operations, communication and time. No jax."""
