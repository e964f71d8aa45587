"""The options of exports of multimodal models.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.option_spec import OptionSpec, PathLike


class TowersOptions(TypedDict, total=False):
    """The parts of a multimodal model in an export."""

    text_only: Annotated[
        bool,
        OptionSpec(
            None,
            "Write the text model of a multimodal checkpoint alone.",
            "Write the text model of a multimodal checkpoint without its towers. Default: False.",
            default=False,
            position=27,
            record=63,
        ),
    ]
    towers: Annotated[
        PathLike | None,
        OptionSpec(
            "CHECKPOINT",
            "Read the towers of a training step from CHECKPOINT. Default: the model that the run"
            " started from.",
            "Checkpoint with the towers of a training step. Default: the model that the run started"
            " from.",
            cli_type=str,
            position=28,
            record=64,
        ),
    ]
