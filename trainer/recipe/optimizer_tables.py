"""The recipe table `[optimizer]`: a tagged union of one table per optimizer, each with its own keys.

A new optimizer needs a table, an entry in `OPTIMIZER_TABLES`, a member in `AnyOptimizerTable`, and
a rule in `trainer.training.optimizers`. Its `type` has no default: only `AdamWTable.type` has
one, so that it may be omitted.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from prepcli.models.param_tree import ParamLeaf, factored_axes, is_layer_matrix, matches_any
from trainer.recipe.key_types import (
    InSchedule,
    NonNegativeFloat,
    NonNegativeInt,
    Patterns,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    if_absent,
)
from trainer.recipe.lr_schedule import ScheduleKind, ScheduleTable

DEFAULT_OPTIMIZER = "adamw"
# Axes of a parameter that a moment averages.
MomentAxes = tuple[int, ...]
WHOLE: MomentAxes = ()
# PaLM (arXiv:2204.02311, section 5): 0.01 for 10,000 steps, then 1 / sqrt(step).
# Both rates are 0.01 at step 10,000.
PALM_WARMUP_STEPS = 10_000
# The `lr` of palm at which its learning rate is 1 / sqrt(step).
PALM_REFERENCE_LR = 0.01

ClipNorm = Annotated[
    NonNegativeFloat,
    Field(description="maximum global norm of the gradients. `0`: no clipping", examples=[1.0]),
]
FirstDecay = Annotated[
    UnitInterval, Field(description="decay rate of the first moment", examples=[0.9])
]
SecondDecay = Annotated[
    UnitInterval, Field(description="decay rate of the second moment", examples=[0.95])
]
Epsilon = Annotated[
    PositiveFloat,
    Field(description="added to the square root of the second moment", examples=[1e-8]),
]
Momentum = Annotated[
    UnitInterval, Field(description="decay rate of the momentum. `0`: none", examples=[0.9])
]
Nesterov = Annotated[bool, Field(description="Nesterov's momentum", examples=[True])]
SecondMomentPower = Annotated[
    UnitInterval,
    Field(description="power r of the decay rate 1 - step^-r of the second moment", examples=[0.8]),
]
ScaleByParameter = Annotated[
    bool,
    Field(
        description="multiply updates by the root mean square of the parameter, layer by layer",
        examples=[True],
    ),
]

ScaleBy = Annotated[
    Literal["layer", "stacked"],
    Field(
        description="root mean squares of parameters and updates: of each layer's matrix, or of all stacked layers "
        "together, as in optax. The result then depends on whether the checkpoint stacks its layers",
        examples=["stacked"],
    ),
]


class OptimizerTable(ScheduleTable):
    """The learning rate schedule, weight decay and state: the keys that all optimizers have."""

    weight_decay: NonNegativeFloat = Field(
        default=0.0,
        description="weight decay, multiplied by the learning rate. It is not applied to biases and norms, nor to "
        "relative position biases",
        examples=[0.01],
    )
    decay_embeddings: bool = Field(
        default=True, description="apply weight decay to embeddings as well", examples=[False]
    )
    decay_exclude: Patterns = Field(
        default=(),
        description="leaves without weight decay besides biases and norms: a path such as `layers.attn.o.weight`, or "
        "`re:` and a regular expression that is searched in paths without layer numbers",
        examples=[["re:attn\\.o"]],
    )
    decay_include: Patterns = Field(
        default=(),
        description="biases, norms and other leaves that have weight decay as well, in the notation of "
        "`decay_exclude`, which has priority. `re:.`: all",
        examples=[["re:norm"]],
    )
    freeze: Patterns = Field(
        default=(),
        description="leaves that are not trained, in the notation of `decay_exclude`. They have no optimizer state",
        examples=[["embed.tokens", "re:norm"]],
    )
    moment_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of the moments between steps. `bfloat16`: half the memory, rounded stochastically by "
        "`seed`, step and element",
        examples=["bfloat16"],
    )
    ema: UnitInterval = Field(
        default=0.0,
        description="decay rate of an exponential moving average of the parameters, in the optimizer state. `0`: none",
        examples=[0.999],
    )
    loss_scale: PositiveFloat | Literal["dynamic"] | None = Field(
        default=None,
        description="factor of the loss for gradients in float16. `dynamic`: halved after a step that overflows, "
        "which is skipped, and doubled after 2,000 steps without one",
        examples=[1024.0],
        json_schema_extra=if_absent("dynamic for float16, else none"),
    )

    def trained_leaves(self, leaves: Mapping[str, ParamLeaf]) -> dict[str, ParamLeaf]:
        """Return the parameters without a match in `freeze`, by path."""
        return {path: leaf for path, leaf in leaves.items() if not matches_any(self.freeze, path)}

    @abstractmethod
    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield the moments of a parameter: the axes that each averages, e.g. (1,) for row means, or WHOLE."""


class AdamWTable(OptimizerTable):
    """Adam with decoupled weight decay."""

    type: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    b1: FirstDecay = 0.9
    b2: SecondDecay = 0.999
    eps: Epsilon = 1e-8
    clip_norm: ClipNorm = 1.0

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield both moments of Adam."""
        yield from (WHOLE, WHOLE)


class AdafactorTable(OptimizerTable):
    """Adafactor: a second moment of row and column means."""

    type: Literal["adafactor"] = Field(description="second moments of row and column means")
    clip_norm: ClipNorm = 1.0
    momentum: Momentum = 0.0
    # Adafactor (arXiv:1804.04235): the second moment decays with 1 - step^-0.8.
    decay_rate: SecondMomentPower = 0.8
    factored: bool = Field(
        default=True, description="keep row and column means of matrices only", examples=[False]
    )
    min_factored_size: PositiveInt = Field(
        default=128, description="smallest dim of a matrix that is factored", examples=[128]
    )
    clip_threshold: NonNegativeFloat = Field(
        default=1.0,
        description="maximum root mean square of the update of a parameter, layer by layer. `0`: no limit",
        examples=[1.0],
    )
    scale_by_parameter: ScaleByParameter = True
    scale_by: ScaleBy = "layer"

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield two means of a factored second moment, each without the axis of its average, and the momentum."""
        axes = factored_axes(leaf, self.min_factored_size) if self.factored else None
        yield from (axes.row_mean, axes.col_mean) if axes else (WHOLE,)
        if self.momentum:
            yield WHOLE


class LionTable(OptimizerTable):
    """Lion: the sign of an interpolated momentum."""

    type: Literal["lion"] = Field(description="sign of an interpolated momentum")
    # Lion (arXiv:2302.06675): 0.9 weights the update, 0.99 the momentum that is kept.
    b1: FirstDecay = 0.9
    b2: SecondDecay = 0.99
    clip_norm: ClipNorm = 1.0

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield the momentum."""
        yield WHOLE


class MuonTable(OptimizerTable):
    """Muon: orthogonalized momentum for the matrices of layers, Adam for all other parameters."""

    type: Literal["muon"] = Field(
        description="orthogonalized momentum for matrices of layers, AdamW for all others"
    )
    b1: FirstDecay = 0.9
    b2: SecondDecay = 0.95
    eps: Epsilon = 1e-8
    clip_norm: ClipNorm = 1.0
    momentum: Momentum = 0.95
    nesterov: Nesterov = True
    bias_correction: bool = Field(
        default=True,
        description="correct the bias of the momentum as Adam and optax do. `false`: as in the original post",
        examples=[False],
    )
    newton_schulz_steps: PositiveInt = Field(
        default=5, description="Newton-Schulz iterations of the orthogonalization", examples=[5]
    )
    # AdamW's updates have a root mean square of 0.2 to 0.4 (arXiv:2502.16982). With 0.2, matrices
    # take the learning rate and the weight decay of AdamW.
    update_rms: NonNegativeFloat = Field(
        default=0.2,
        description="root mean square of the updates of matrices, 0.2 for the `lr` of AdamW. `0`: scale by "
        "sqrt(max(1, rows / columns)) instead",
        examples=[0.2],
    )

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield one momentum of a matrix of layers, and two moments of any other leaf."""
        yield WHOLE
        if not is_layer_matrix(leaf):
            yield WHOLE


class SGDTable(OptimizerTable):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = Field(description="gradient descent with momentum")
    clip_norm: ClipNorm = 1.0
    momentum: Momentum = 0.9
    nesterov: Nesterov = False

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield the momentum, if there is one."""
        if self.momentum:
            yield WHOLE


class PalmTable(OptimizerTable):
    """Adafactor without factors, with the rates and the weight decay of PaLM.

    Runs of llamabpt scale by all stacked layers together: `scale_by = "stacked"`.

    With `schedule = "rsqrt"`, `lr` is relative to 0.01: the learning rate is lr / 0.01 /
    sqrt(max(step, warmup_steps)). The weight decay of a step is weight_decay / 1e-4 times the
    square of the learning rate.
    """

    default_warmup_steps: ClassVar[int] = PALM_WARMUP_STEPS

    type: Literal["palm"] = Field(
        description="unfactored Adafactor with momentum, rates and decay of PaLM"
    )
    lr: PositiveFloat = Field(
        default=PALM_REFERENCE_LR, description="learning rate, relative to 0.01"
    )
    schedule: ScheduleKind = Field(default="rsqrt", description="shape of the learning rate decay")
    warmup_steps: InSchedule[NonNegativeInt | None] = Field(
        default=None,
        description="steps with the first learning rate",
        json_schema_extra=if_absent(f"from `warmup_ratio`, or {PALM_WARMUP_STEPS}"),
    )
    weight_decay: NonNegativeFloat = Field(
        default=1e-4, description="weight decay, relative to 1e-4"
    )
    clip_norm: ClipNorm = 1.0
    momentum: Momentum = 0.9
    decay_rate: SecondMomentPower = 0.99
    scale_by: ScaleBy = "layer"

    def initial_and_peak(self, warmup_steps: int) -> tuple[float, float]:
        """Return the constant rate of warm-up with `rsqrt`."""
        if self.schedule != "rsqrt":
            return super().initial_and_peak(warmup_steps)
        rate = self.lr / PALM_REFERENCE_LR / math.sqrt(max(warmup_steps, 1))
        return rate, rate

    def moments(self, leaf: ParamLeaf) -> Iterator[MomentAxes]:
        """Yield the second moment, and the momentum."""
        yield WHOLE
        if self.momentum:
            yield WHOLE


OPTIMIZER_TABLES: Mapping[str, type[OptimizerTable]] = {
    "adamw": AdamWTable,
    "adafactor": AdafactorTable,
    "lion": LionTable,
    "muon": MuonTable,
    "sgd": SGDTable,
    "palm": PalmTable,
}


def optimizer_type(value: Any) -> str:
    """Return the type of an `[optimizer]` table. The default if it is absent or unknown, which validation reports."""
    # pydantic passes a table when it validates a recipe, and a model when it serializes one.
    name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if isinstance(name, str) and name in OPTIMIZER_TABLES:
        return name
    return DEFAULT_OPTIMIZER


AnyOptimizerTable = Annotated[
    Annotated[AdamWTable, Tag("adamw")]
    | Annotated[AdafactorTable, Tag("adafactor")]
    | Annotated[LionTable, Tag("lion")]
    | Annotated[MuonTable, Tag("muon")]
    | Annotated[SGDTable, Tag("sgd")]
    | Annotated[PalmTable, Tag("palm")],
    # `Field(discriminator="type")` would make `type` required in every recipe. The function has a default.
    Discriminator(optimizer_type),
]
