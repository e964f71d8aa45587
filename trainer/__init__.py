"""What a model is and how it is trained; knows nothing of files and commands."""
