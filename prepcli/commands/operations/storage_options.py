"""The option of conversions to an Orbax item for the storage of its arrays.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec
from prepcli.planning.item_storage import StorageName


class StorageOptions(TypedDict, total=False):
    """The storage of the arrays of an Orbax item."""

    storage: Annotated[
        StorageName,
        OptionSpec(
            "FORM",
            "Store arrays as ocdbt or zarr3 (a few data files), or files or zarr3-files (one file per chunk).",
            '"ocdbt" (the default) or "zarr3": an OCDBT database of zarr 2 or 3. "files" or "zarr3-files": one file'
            " per chunk, for Pathways, of zarr 2 or 3.",
            default="ocdbt",
            position=31,
            record=17,
        ),
    ]
