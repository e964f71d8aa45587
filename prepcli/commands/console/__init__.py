"""Terminal output: results, notes, progress, and numbers and lists as text. The only package that prints."""
