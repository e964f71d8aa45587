"""Optimizers: the tables of recipes as update rules, and their state."""
