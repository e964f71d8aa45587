"""One module per model family. `trainer.models.registry` lists them."""
