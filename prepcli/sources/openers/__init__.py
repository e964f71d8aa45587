"""One opener per checkpoint format, from a folder to a `Source`."""
