"""prep's models as modules of Flax, and their parameters as the trees of the Flax classes of transformers."""
