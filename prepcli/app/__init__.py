"""The commands as Typer takes them: what is parsed, called and printed."""
