"""One module a command: from a request to a Plan, and its run."""
