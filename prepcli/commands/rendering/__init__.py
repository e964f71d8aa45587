"""Results of operations as text for a terminal and as JSON."""
