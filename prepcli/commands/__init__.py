"""The command line and the public functions. The only package of prepcli that imports trainer."""
