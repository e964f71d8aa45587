"""Layouts of outputs: Hugging Face folder, Orbax item, Flax folder, training step."""
