"""The options of commands with several processes.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec, PositiveInt


class SharingOptions(TypedDict, total=False):
    """How a command divides its work among processes."""

    processes: Annotated[
        str | None,
        OptionSpec(
            "N/I",
            "Write as process I (from 0) of N. Default: from the variables of SLURM or JAX.",
            "Share of this process.",
            environment="PREP_PROCESSES",
            position=45,
        ),
    ]
    workers: Annotated[
        PositiveInt,
        OptionSpec(
            "N",
            "Use N processes on this host.",
            "Number of processes on this host.",
            default=1,
            maximum=256,
            position=46,
        ),
    ]
