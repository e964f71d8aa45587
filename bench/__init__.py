"""Benchmarks of prep: synthetic checkpoints, a cost meter, tables of results. See README.md."""
