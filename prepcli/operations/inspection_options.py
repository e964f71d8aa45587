"""The options of the operations that read a checkpoint and write no other one.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from prepcli.operations.option_spec import OptionSpec, PathLike
from prepcli.operations.options import SourceOptions


class VerifyOptions(SourceOptions, total=False):
    """Options of `verify`."""

    quick: Annotated[
        bool,
        OptionSpec(
            None,
            "Compare names, shapes and dtypes; read no values.",
            "Compare names, shapes and dtypes only. No value is read; default: False.",
            default=False,
            position=21,
        ),
    ]
    accept: Annotated[
        Sequence[PathLike],
        OptionSpec(
            "FILE",
            "Record the new digest of a settings or tokenizer file that you changed; repeatable.",
            "Settings or tokenizer files of the checkpoint that you changed. Their new digests are"
            " recorded if nothing else differs.",
            default=(),
            position=21,
        ),
    ]
