"""One module per model family. `prepcli.models.registry` lists them."""
