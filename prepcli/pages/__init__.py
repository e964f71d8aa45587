"""HTML pages and charts that `prep report`, `prep plan` and `prep demo` write."""
