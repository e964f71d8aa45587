"""A small token store."""

from __future__ import annotations

import numpy as np

from trainer.data.store_writer import TokenWriter

NAME = "0" * 32


def fill(writer: TokenWriter) -> None:
    """Append three documents, one of them empty."""
    writer.append(np.array([1, 2, 3], np.uint32))
    writer.append(np.array([], np.uint32))
    writer.append(np.array([7, 5], np.uint32), ends=[1, 1, 2])
