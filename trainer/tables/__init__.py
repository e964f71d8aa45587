"""Read Parquet and Arrow files in a process of their own, which may crash and has a limit on its memory."""
