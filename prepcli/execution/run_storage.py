"""The storage of a training run: a local folder, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prepcli.core.process_group import ProcessGroup
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.formats.manifest import RECREATE_HINT
from prepcli.planning.plan import Plan
from prepcli.restore.item_reader import ItemReader

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
        """Name for the messages between the processes about this save, e.g. `save-100`."""
        # Each step is saved once, so the number makes the name unique in a run. The exchange of a later save cannot
        # read values of an earlier one.
        return f"save-{self.step}"


class RunStorage(Protocol):
    """Steps and other files of one run.

    A step exists completely or not at all: `write_step` makes it visible last, and `remove_step` hides it first.
    Only process 0 locks the run, removes steps and stores the files that all processes share.
    """

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

    def check(self) -> None:
        """Check that a run may be written here.

        Raises:
            PrepError: Other files are here, or the storage cannot be reached.
        """
        ...

    def acquire(self, note: Callable[[str], None]) -> None:
        """Lock the run if possible, and remove leftovers of killed processes.

        A second call has no effect if the first one got a lock.

        Args:
            note: Receives a warning if the storage has no locks.

        Raises:
            PrepError: Another process holds the run.
        """
        ...

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock.

        Args:
            after_error: Also remove what `acquire` created for a run without a recipe and steps.
        """
        ...

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with complete checkpoints, ascending.

        Args:
            refresh: Allow a request that may take long or fail. Without it, a bucket returns the steps of its last
                listing and the later changes by this process.
        """
        ...

    def step_name(self, step: int) -> str:
        """Return the path or URL of a step."""
        ...

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step. See `open_reader`."""
        ...

    def write_step(self, save: StepSave) -> None:
        """Write a step. It becomes visible once it is complete.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        ...

    def remove_step(self, step: int) -> None:
        """Remove a step.

        The first change makes it invisible, so that a kill leaves no partial step. Raise PrepError if removal fails.
        """
        ...

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Return a local path of a file of the run. No file exists at the path if the run has none.

        Args:
            name: Name of the file, such as `metrics.jsonl`.
            folder: Folder to which a bucket downloads the file, replacing an older one.
        """
        ...

    def store_file(self, name: str) -> None:
        """Store a file of `local_folder` durably, if it exists."""
        ...
