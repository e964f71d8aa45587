"""The parts of a training run: the request, the context in this process, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import RunObserver
from prepcli.execution.training_storage import RunStorage
from trainer.recipe import LoadedRecipe, Recipe
from trainer.training.eval_metrics import NO_TOKEN_FUNCTIONS, TokenFunctions

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup
    from prepcli.models.attention_kernels import KernelChoice
    from trainer.run.start import StartCheckpoint
    from trainer.training.loop_config import LoopConfig


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Request to train with a recipe."""

    recipe: Path  # as the user named it
    overrides: tuple[str, ...] = ()  # `KEY=VALUE`
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


class StepExporter(Protocol):
    """Exporter of saved steps to Hugging Face folders.

    The caller passes it, because operations lie above this package.
    """

    def export(self, step: str, out: Path) -> None:
        """Export a step.

        Args:
            step: Path or URL of the step.
            out: Folder to create. A complete folder is left as it is.

        Raises:
            PrepError: The step cannot be exported.
        """
        ...

    def push(self, step: str, out: Path, repository: str) -> Mapping[str, str]:
        """Export a step, upload it to the hub, and return `repo`, `revision` and `commit` of the upload.

        Raises:
            PrepError: The step cannot be exported or uploaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A run in this process, from the time when the processes are connected.

    Attributes:
        loaded: The recipe, and the origins of its values.
        request: The request.
        storage: Folder or bucket of the run.
        group: Processes of the run.
        observer: Receives notes, warnings and progress of this process.
        exporter: Exports steps.
        enter_phase: Sets the phase of this process, such as `load` or `step 12`, for the watchdog of the run.
    """

    loaded: LoadedRecipe
    request: TrainRequest
    storage: RunStorage
    group: ProcessGroup
    observer: RunObserver
    exporter: StepExporter
    enter_phase: Callable[[str], None] = lambda phase: None

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
class PreparedRun:
    """A run that is ready to start, or to resume at `step`.

    Attributes:
        run: The run.
        start: Open checkpoint with the initial parameters, or with the state to resume from.
        model_config: config.json of the model, with the recipe's rotary embedding.
        loop: Configuration of the training loop.
        kernel: Attention kernel, and the reason for it.
        memory: Memory estimate in bytes.
        processes_per_host: Largest number of processes of the run on one host.
    """

    run: Run
    start: StartCheckpoint
    model_config: HFConfig
    loop: LoopConfig
    kernel: KernelChoice
    memory: Mapping[str, int | None]
    processes_per_host: int

    @property
    def step(self) -> int:
        """Step to resume from, 0 in a new run."""
        return self.start.resume_step


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of `train_run` in one process.

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
