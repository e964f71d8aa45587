"""A training run: the request of `prep train`, and what the run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.execution.run_place import RunPlace
from prepcli.targets.training_step import StartModel
from trainer.recipe import LoadedRecipe, Recipe
from trainer.training.token_functions import NO_TOKEN_FUNCTIONS, TokenFunctions

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup
    from trainer.models.attention_kernels import KernelChoice
    from trainer.training.loop import Job


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Request of `prep train`."""

    recipe: Path
    overrides: tuple[str, ...] = ()  # `KEY=VALUE`
    out: Path | None = None  # folder or URL of the run; None: `runs/NAME`
    restart: bool = False  # delete the run's steps and start again
    stop_after: int = 0  # steps in this process; 0: all
    dry_run: bool = False
    offline: bool = False
    stream: bool = False  # read a hub model without a local copy
    verify: bool = True  # check the start checkpoint against its checksums
    token_functions: TokenFunctions = NO_TOKEN_FUNCTIONS  # a user's loss and metrics
    force: bool = False  # start even if a step is estimated not to fit into memory


@dataclass(frozen=True, slots=True)
class Run:
    """Run that is ready to start, or to resume at `step`."""

    loaded: LoadedRecipe
    place: RunPlace
    start_checkpoint: Path | StartModel  # initial parameters, or the state to resume from
    step: int
    config: Mapping[str, Any]  # config.json of the model, with the recipe's rotary embedding
    job: Job
    kernel: KernelChoice
    memory: dict[str, Any]  # estimate in bytes
    group: ProcessGroup
    processes_per_host: int  # largest number on one host
    lora: Mapping[str, Any] | None = None  # settings of the adapters that the run trains

    @property
    def folder(self) -> Path:
        """Folder of the run's files on this machine."""
        return self.place.local_folder

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""
        return self.loaded.recipe
