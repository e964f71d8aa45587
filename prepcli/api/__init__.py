"""Functions and result types of the public API. `import prepcli` exports them."""
