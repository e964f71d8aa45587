"""Arrays in temporary files, for results larger than memory."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import numpy as np

from prepcli.stores.files import io_error


def temporary_folder() -> Path:
    """Return the folder of temporary files: `TMPDIR`, or the one of the system."""
    return Path(tempfile.gettempdir())


def file_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array in a temporary file without a name. The file is removed with the array.

    Raises:
        PrepError: The file system has no room.
    """
    nbytes = 4 * math.prod(shape)
    try:
        with tempfile.TemporaryFile() as file:
            # A write to a mapped page without a block on the disk would end the process with a signal.
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise io_error(temporary_folder(), error) from error
