"""Neural network layers as functions of arrays."""
