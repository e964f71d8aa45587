"""Files that are read and written with untrusted names or in untrusted folders."""
