"""Read Parquet and Arrow files in a worker process. It may crash, and its memory is limited."""
