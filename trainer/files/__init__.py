"""Open and write files with untrusted names or in untrusted folders, and run reads and writes in threads."""
