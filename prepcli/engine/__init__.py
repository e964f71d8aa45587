"""Bytes from files into files, through bounded buffers, in order. It knows neither models nor formats."""
