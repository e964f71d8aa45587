"""A training run in this process: what the user asked for, the storage and the processes, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from prepcli.core.errors import PrepError
from prepcli.core.observer import RunObserver
from prepcli.execution.training_storage import RunStorage
from trainer.recipe import LoadedRecipe, Recipe
from trainer.training.eval_metrics import NO_TOKEN_FUNCTIONS, TokenFunctions

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup

# Exports a step to a folder, and uploads it if a repository of the hub is named:
# (path or URL of the step, folder, repository) -> `repo`, `revision` and `commit` of the upload
ExportStep: TypeAlias = Callable[[str, Path, str | None], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The options of `prep train`."""

    recipe: Path  # as the user named it
    # Folder or URL of the run. The default is `runs/NAME`.
    out: Path | None = None
    restart: bool = False  # delete the run's steps and start again
    stop_after: int = 0  # steps in this process, 0 for all
    dry_run: bool = False
    offline: bool = False
    stream: bool = False  # read a hub model without a local copy
    # Check the start checkpoint against its checksums.
    verify: bool = True
    token_functions: TokenFunctions = NO_TOKEN_FUNCTIONS  # a user's loss and metrics
    # Start even if the memory estimate of a step exceeds the device memory.
    force: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A run in this process, from the time when the processes are connected.

    Attributes:
        loaded: The recipe, and the origins of its values.
        options: The options of the user.
        storage: Folder or bucket of the run.
        group: Processes of the run.
        observer: Receives notes, warnings and progress of this process.
        export: Exports a step.
        enter_phase: Sets the phase of this process, such as `load` or `step 12`, for the watchdog of the run.
        processes_per_host: Largest number of processes of the run on one host.
    """

    loaded: LoadedRecipe
    options: TrainSettings
    storage: RunStorage
    group: ProcessGroup
    observer: RunObserver
    export: ExportStep
    enter_phase: Callable[[str], None] = lambda phase: None
    processes_per_host: int = 1

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""
        return self.loaded.recipe

    @property
    def folder(self) -> Path:
        """Folder of the run's files on this machine."""
        return self.storage.local_folder

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which alone writes the files that all processes share."""
        return self.group.index == 0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run in one process.

    Attributes:
        run: Path or URL of the run.
        output: Path or URL of the last saved step. None without one.
        step: The last step taken.
        steps: Number of the recipe's last step.
        resumed_at: Step that the run resumed from. 0 means a new run.
        mesh: Mesh of the run.
        attention_kernel: Name of the attention kernel.
        metrics: Last values of the logged metrics. Empty if no step was taken.
        memory: Memory estimate of a dry run in bytes. None without a dry run.
        pushed: Repository, revision and commit of the upload of the last step. None without one.
        end_reason: Why the run ended before the recipe's last step, by `eval.patience`. Empty if it did not.
        error: Why the run was stopped before its end. None if it is finished.
        process: Index of this process in a job of several. None in a run of one process.
    """

    run: str
    output: str | None
    step: int
    steps: int
    resumed_at: int
    mesh: str
    attention_kernel: str
    metrics: Mapping[str, object] = field(default_factory=dict[str, object])
    memory: Mapping[str, int | None] | None = None
    pushed: Mapping[str, str] | None = None
    end_reason: str = ""
    error: PrepError | None = None
    process: int | None = None
