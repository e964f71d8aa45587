"""Storage forms of the arrays of an Orbax item: the values of `--storage`.

This module imports nothing: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Literal

Storage = Literal["ocdbt", "files", "zarr3", "zarr3-files"]

# Each leaf is a folder, and each chunk a file. The other forms have one OCDBT database.
CHUNK_FILE_STORAGES = ("files", "zarr3-files")
# Arrays of zarr 3. The other forms have arrays of zarr 2.
ZARR3_STORAGES = ("zarr3", "zarr3-files")
