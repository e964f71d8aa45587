"""Generate text with a KV cache."""
