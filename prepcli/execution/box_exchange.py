"""Exchange the boxes of shards among processes: which part of each leaf every process saves."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from prepcli.algebra.boxes import Box
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.planning.object_files import LeafBoxes


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
