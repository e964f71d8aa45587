"""The place of a training run: a local folder, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prepcli.planning.plan import Plan
from prepcli.restore.digest_checks import RECREATE_HINT
from prepcli.restore.item_reader import ItemReader
from trainer.distributed.process_group import ProcessGroup
from trainer.models.checkpoint_store import HostLeaf

TOKENS_FOLDER = "data"  # the tokens of the datasets


@dataclass(frozen=True, slots=True)
class StepSave:
    """A step to be written by all processes of a run.

    Attributes:
        step: Number of the step.
        plan: The plan of the step.
        leaves: The leaves, with the shards of this process.
        group: Processes of the run.
    """

    step: int
    plan: Plan
    leaves: Mapping[str, HostLeaf]
    group: ProcessGroup

    @property
    def name(self) -> str:
        """Name of the save, for the exchanges of the processes."""
        return f"save-{self.step}"


class RunPlace(Protocol):
    """Where the steps and the other files of a run are stored."""

    @property
    def name(self) -> str:
        """Path or URL of the run, for messages and commands."""
        ...

    @property
    def local_folder(self) -> Path:
        """Folder of the recipe, the metrics and the tokens on this machine."""
        ...

    @property
    def is_on_disk(self) -> bool:
        """Whether steps are saved to `local_folder`, which all processes of the run see."""
        ...

    def min_split_nbytes(self, group: ProcessGroup) -> int:
        """Return the size per layer below which the shards of a leaf share a chunk."""
        ...

    def check(self, num_processes: int) -> None:
        """Raise PrepError if something else is there, it cannot be reached, or too many processes would write to it."""
        ...

    def contains(self, checkpoint: str) -> bool:
        """Return whether a path or URL is in a step of the run."""
        ...

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, ascending."""
        ...

    def known_steps(self) -> list[int]:
        """Return the steps as `steps` does, but without a request that may take long or fail."""
        ...

    def has_step(self, step: int) -> bool:
        """Return whether something has the name of a step, complete or not."""
        ...

    def step_name(self, step: int) -> str:
        """Return the path or URL of a step."""
        ...

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step; see `open_reader`."""
        ...

    def model_files_folder(self, step: int) -> Path | None:
        """Return the local folder with the small files of a step's model; None if there is none."""
        ...

    def acquire(self, note: Callable[[str], None]) -> None:
        """Lock the run if possible, and remove leftovers of killed processes. Only process 0 calls it.

        A second call has no effect in a place with locks.
        """
        ...

    def release(self) -> None:
        """Release the lock."""
        ...

    def leave(self) -> None:
        """Release the lock after an error. Remove the folders of `acquire` if the run has no recipe and no steps."""
        ...

    def write_step(self, save: StepSave) -> None:
        """Write a step, which becomes visible once it is complete; PrepError if a process cannot write its part."""
        ...

    def remove_step(self, step: int) -> None:
        """Remove a step, which is invisible from the first change on; PrepError if it cannot be removed."""
        ...

    def recipe_file(self) -> Path:
        """Return a local file with the recipe of the run so far."""
        ...

    def restore_file(self, name: str) -> None:
        """Make the local folder's file of this name that of the run so far; remove it if the run has none."""
        ...

    def store_file(self, name: str) -> None:
        """Store a file of the local folder durably, if it exists."""
        ...
