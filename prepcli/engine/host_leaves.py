"""Leaves in memory, read by the engine as files are: fetched for their first byte, let go after their last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prepcli.engine.files import PAGE, ByteArray
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.strided_copies import StridedCopy
from trainer.models.checkpoint_store import HostLeaf


class HostLeafReader:
    """`file` of a copy is the number of a leaf, `offset` a byte of it in C order. Every byte is to be read once."""

    def __init__(self, leaves: Sequence[HostLeaf]) -> None:
        self._leaves = leaves
        self._fetched: dict[int, ByteArray] = {}
        self._read_nbytes = [0] * len(leaves)

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read a copy that is one run; it comes back as deep in a page as `copy.offset` is."""
        lead = copy.file_offset % PAGE
        return self.read_runs((copy,), into[lead:])

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read all runs of the copies one after another."""
        at = 0
        for copy in copies:
            data = self._leaf_bytes(copy.file)
            shape = (*(count for count, _ in copy.repeats), copy.run_nbytes)
            steps = (*(step for _, step in copy.repeats), 1)
            runs = np.lib.stride_tricks.as_strided(data[copy.file_offset :], shape, steps, writeable=False)
            into[at : at + copy.nbytes].reshape(shape)[...] = runs
            at += copy.nbytes
            self._release_when_read(copy)
        return into[:at]

    def _leaf_bytes(self, number: int) -> ByteArray:
        if number not in self._fetched:
            leaf = self._leaves[number]
            array = np.ascontiguousarray(leaf.fetch())
            if array.size and (array.shape, array.dtype) != (leaf.shape or (1,), numpy_dtype(leaf.dtype)):
                raise ValueError(f"a leaf of {leaf.shape} {leaf.dtype} was fetched as {array.shape} {array.dtype}")
            self._fetched[number] = array.reshape(-1).view(np.uint8)
        return self._fetched[number]

    def _release_when_read(self, copy: StridedCopy) -> None:
        self._read_nbytes[copy.file] += copy.nbytes
        if self._read_nbytes[copy.file] == self._fetched[copy.file].size:
            del self._fetched[copy.file]
