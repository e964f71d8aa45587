"""Device meshes and sharding of arrays in JAX."""
