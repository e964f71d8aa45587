"""The option for the tensor map of a user.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec, PathLike

TENSOR_MAP = OptionSpec(
    "FILE",
    "Read the tensors through the rows of FILE (prep docs map).",
    "File of rows from the tensors of the files to those of a model. Default: none.",
    position=23,
    record=65,
)


class ExportMapOptions(TypedDict, total=False):
    """The map from a model to the tensors of an export."""

    map: Annotated[
        PathLike | None,
        replace(
            TENSOR_MAP,
            help="Write the tensors on the right sides of the rows of FILE (prep docs map).",
            doc="File of rows. Their right sides are the tensors to write. Default: none.",
        ),
    ]


class MapOptions(TypedDict, total=False):
    """The map between the tensors of a checkpoint and those of a model."""

    map: Annotated[PathLike | None, TENSOR_MAP]
