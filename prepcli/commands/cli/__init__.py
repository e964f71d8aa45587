"""The Typer app: options, groups of commands, exit codes."""
