"""The storage of a training run, a local folder or a prefix of an object store, and joint work of its processes.

If the work fails in one process, it fails in all of them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prepcli.algebra.boxes import Box
from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.formats.manifest import RECREATE_HINT
from prepcli.planning.object_files import LeafBoxes
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


@contextlib.contextmanager
def joint_work(group: ProcessGroup, name: str) -> Iterator[None]:
    """Wait at the end of a `with` block for all processes. Raise in each one if the block failed in any of them.

    Args:
        group: The processes.
        name: Name of the block, the same in all processes and unique among the threads of a process.

    Raises:
        PrepError: The block raised in another process.
    """
    # Two exchanges: process 0 has all failures only after the gather, and each process must learn of the
    # first one. A process that failed takes part too, or the others would wait for it.
    own_error: Exception | None = None
    own_failure = ""
    try:
        yield
    except Exception as error:
        own_error = error
        own_failure = _encode_error(error, group.index)
    failures = group.gather(name, own_failure)
    failure = group.broadcast(f"{name}-outcome", next(filter(None, failures), ""))
    if own_error is not None:
        raise own_error
    if failure:
        raise PrepError(**json.loads(failure))


def _encode_error(error: Exception, index: int) -> str:
    """Return the fields of a PrepError with the name of the process, as JSON."""
    if not isinstance(error, PrepError):
        error = PrepError("the work failed", f"{type(error).__name__}: {error}", RERUN_HINT)
    return json.dumps({**error.fields(), "what": f"process {index}: {error.what}"})


def exchange_boxes(
    group: ProcessGroup, name: str, leaves: Mapping[str, HostLeaf]
) -> Sequence[LeafBoxes]:
    """Exchange the boxes of shards with all processes. Return each process's boxes by leaf name.

    Args:
        group: The processes.
        name: Start of the names of the exchanges.
        leaves: Leaves with the shards of this process, by name.
    """
    own: dict[str, list[Box]] = {}
    for leaf_name, leaf in leaves.items():
        # Most leaves have no shard of a process among thousands.
        if leaf.shards:
            own[leaf_name] = [shard.box for shard in leaf.shards]
    gathered = group.gather(f"{name}-boxes", encode_boxes([own]))
    # Only process 0 has the texts of all processes after a gather, so that it sends them to the others.
    collected: list[LeafBoxes] = []
    for text in gathered:
        collected += decode_boxes(text)
    return decode_boxes(group.broadcast(f"{name}-all-boxes", encode_boxes(collected)))


def encode_boxes(processes: Sequence[LeafBoxes]) -> str:
    """Return the boxes of processes as compressed JSON: the coordination service limits the size of a text."""
    return base64.b64encode(zlib.compress(json.dumps(processes).encode())).decode()


def decode_boxes(text: str) -> list[LeafBoxes]:
    """Return the boxes of processes from `encode_boxes`."""
    return list(map(_as_boxes, json.loads(zlib.decompress(base64.b64decode(text)))))


def _as_boxes(process: Mapping[str, Any]) -> LeafBoxes:
    """Return the boxes of a process from JSON: lists become tuples."""
    leaf_boxes: dict[str, list[Box]] = {}
    for name, boxes in process.items():
        leaf_boxes[name] = [tuple((first, stop) for first, stop in box) for box in boxes]
    return leaf_boxes
