"""Open and write files with untrusted names or in untrusted folders."""
