"""The option of conversions for the optimizer state.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.core.option_spec import OptionSpec


class TrainingStateOptions(TypedDict, total=False):
    """The training state in a conversion between frameworks."""

    training_state: Annotated[
        bool,
        OptionSpec(
            None,
            "Convert the optimizer's moments and the step as well.",
            "Convert the moments of the optimizer and the step as well, to resume the training in another framework."
            " Default: False.",
            default=False,
            position=29,
            record=66,
        ),
    ]
