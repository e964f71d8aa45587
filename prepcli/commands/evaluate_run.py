"""An evaluation: the request of `prep eval`, and the model that it loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prepcli.commands.evaluation_recipe import EvalData
from prepcli.operations.conversion import CommonOptions

if TYPE_CHECKING:
    from trainer.models.param_tree import Tree
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import EvalStep

Reduction = Literal["fast", "exact"]


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Request of `prep eval`."""

    common: CommonOptions
    data: EvalData
    tokenizer: Path | None = None  # None: the checkpoint's tokenizer.json
    cache: Path | None = None  # None: a temporary folder
    batch_size: int = 8
    limit: int = 0  # sequences of each source; 0: all
    mesh: str | None = None  # None: one device
    dtype: str | None = None  # None: bfloat16 if all parameters have it, else float32
    reduction: Reduction = "fast"
    metrics: tuple[str, ...] = ()  # of targets generated from the sources of pairs
    verify: bool = True  # check the bytes against their checksums


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its devices, and the options of its evaluation."""

    params: Tree
    forward_config: ForwardConfig
    eval_step: EvalStep
    batch_size: int
