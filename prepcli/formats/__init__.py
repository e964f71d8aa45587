"""File formats: a source and/or a sink each. They know bytes, not models."""
