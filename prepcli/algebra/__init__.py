"""Index algebra: boxes, axis maps, chunk grids and strided copies. Pure."""
