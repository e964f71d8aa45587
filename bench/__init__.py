"""Measurements of prep: synthetic checkpoints, a cost meter, the evidence table. See README.md."""
