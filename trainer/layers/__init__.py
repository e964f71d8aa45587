"""What layers compute, as functions of arrays."""
