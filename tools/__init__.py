"""Generators of docs pages and diagrams, and the import graph that tests use too."""
