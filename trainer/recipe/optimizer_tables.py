"""The recipe table `[optimizer]`: a tagged union of one table per optimizer, each with its own keys.

A new optimizer needs a table, an entry in `OPTIMIZER_TABLES`, a member in `AnyOptimizerTable`, and an entry in
`trainer.training.optimizers`. Its `type` has no default: only `AdamWTable.type` has one, so that it may be omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from trainer.recipe.key_types import (
    STRICT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    if_absent,
)

DEFAULT_OPTIMIZER = "adamw"


class OptimizerTable(BaseModel):
    """The learning rate schedule: the keys that all optimizers have."""

    model_config = STRICT

    lr: PositiveFloat = Field(description="peak learning rate, reached after warm-up", examples=[2e-5])
    end_lr: NonNegativeFloat = Field(
        default=0.0, description="learning rate at the end of the decay; not used by constant", examples=[2e-6]
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="shape of the learning rate decay", examples=["cosine"]
    )
    warmup_steps: NonNegativeInt | None = Field(
        default=None,
        description="steps in which the learning rate rises from 0",
        examples=[100],
        json_schema_extra=if_absent("from `warmup_ratio`, or 0"),
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="warm-up as a fraction of the run's steps, rounded to whole steps",
        examples=[0.03],
        json_schema_extra=if_absent("from `warmup_steps`, or 0"),
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="step at which `end_lr` is reached, counted from 0, warm-up included",
        examples=[10000],
        json_schema_extra=if_absent("the run's steps"),
    )


class AdamWTable(OptimizerTable):
    """Adam with decoupled weight decay."""

    type: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    weight_decay: NonNegativeFloat = Field(
        default=0.0,
        description="weight decay, multiplied by the learning rate; not applied to biases and norms",
        examples=[0.01],
    )
    decay_embeddings: bool = Field(
        default=True, description="apply weight decay to embeddings as well", examples=[False]
    )
    b1: UnitInterval = Field(default=0.9, description="decay rate of the first moment", examples=[0.9])
    b2: UnitInterval = Field(default=0.999, description="decay rate of the second moment", examples=[0.95])
    eps: PositiveFloat = Field(
        default=1e-8, description="added to the square root of the second moment", examples=[1e-8]
    )
    clip_norm: NonNegativeFloat = Field(
        default=1.0, description="maximum global norm of the gradients; 0: no clipping", examples=[1.0]
    )


OPTIMIZER_TABLES: Mapping[str, type[OptimizerTable]] = {"adamw": AdamWTable}


def _optimizer_type(value: Any) -> str:
    """Return the type of an `[optimizer]` table; the default if it is absent or unknown, which validation reports."""
    name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return name if isinstance(name, str) and name in OPTIMIZER_TABLES else DEFAULT_OPTIMIZER


AnyOptimizerTable = Annotated[Annotated[AdamWTable, Tag("adamw")], Discriminator(_optimizer_type)]
