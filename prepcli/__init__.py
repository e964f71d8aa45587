"""prep: prepares language-model checkpoints for JAX, exactly, within a stated memory, and so that nothing is lost."""
