"""HTML pages and charts that `prep report`, `prep plan`, `prep inspect` and `prep demo` write."""
