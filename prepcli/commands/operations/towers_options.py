"""The options of exports of models with towers, or with multi-token prediction.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec, PathLike


class TowersOptions(TypedDict, total=False):
    """The parts of a model with towers, or with multi-token prediction, in an export."""

    text_only: Annotated[
        bool,
        OptionSpec(
            None,
            "Leave out the towers of a multimodal model, and multi-token prediction.",
            "Write the text model of a checkpoint without towers and multi-token prediction. Default: False.",
            default=False,
            position=27,
            record=63,
        ),
    ]
    towers: Annotated[
        PathLike | None,
        OptionSpec(
            "CHECKPOINT",
            "Read the towers or the multi-token prediction of a training step from CHECKPOINT. Default: the model that"
            " the run started from.",
            "Checkpoint with the towers or the multi-token prediction of a training step. Default: the model that the"
            " run started from.",
            cli_type=str,
            position=28,
            record=64,
        ),
    ]
