"""Joint work of several processes: if it fails in one of them, it fails in all. They also exchange boxes of shards."""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prepcli.algebra.boxes import Box
from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.planning.process_files import LeafBoxes


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
