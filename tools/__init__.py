"""Generators of pictures in the docs, and what tests share with them."""
