"""`WeightsReader`: reads parameters of any source into arrays, in the leaf layout that `save-init` would write."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from prepcli.engine.blobs import CachedBlob, open_blobs
from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, VOCAB_ATOM, TensorUse
from prepcli.planning.boxes import Box
from prepcli.planning.plan import EqualityCheck
from prepcli.planning.state_names import PARAMS
from prepcli.planning.strided_copies import leaf_box_parts
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.remote.remote_files import MIN_READ_AHEAD_NBYTES, without_read_ahead
from prepcli.restore.duplicates import check_equal, find_duplicates
from prepcli.restore.item_reader import MIN_RUN_NBYTES
from prepcli.restore.job_queue import run_jobs
from prepcli.restore.tensor_jobs import (
    BUFFER_NBYTES,
    Target,
    TensorJob,
    UnequalDuplicateError,
    read_checked,
    read_window,
    tensor_jobs,
)
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from trainer.models import checkpoint_store
from trainer.models.axis_map import AxisMap, Factor, bind_row

BoxArrays = Mapping[Box, np.ndarray]
MAX_THREADS = 4  # each has a buffer of 8 MiB
SHARED_GAP_NBYTES = MIN_READ_AHEAD_NBYTES  # in a remote tensor of several leaves; a shorter request is not faster


@dataclass(frozen=True, slots=True)
class _LeafTensors:
    """A leaf and its tensors."""

    axis_map: AxisMap
    unscanned_index: Mapping[str, int]  # of a leaf that is one of several, such as one layer's
    tensors: Mapping[str, SourceTensor]


class WeightsReader:
    """CheckpointReader of the parameters of a source, with layers stacked on axis 0.

    Attributes:
        source: The checkpoint.
        manifest: The model's facts, as a manifest would record them.
        leaves: Shape, dtype and read unit of each leaf, by dotted name.
        is_remote: Whether the source's files are on a server.
        vocabulary: Vocabulary sizes of the leaves, padding included.
        read_nbytes: Bytes of tensors read so far.
    """

    def __init__(self, source: Source, vocab_multiple: int = 1, verify: bool = True) -> None:
        """Match the tensors of a source with its family's axis-map rows and open its files.

        Args:
            source: The checkpoint.
            vocab_multiple: Pad the vocabulary with zeros to a multiple of this.
            verify: Check each tensor against the digests in the source's manifest.

        Raises:
            PrepError: Tensors are missing or of another shape.
        """
        vocabulary = source.vocabulary()
        padded_vocab_size = -(-vocabulary.stored_size // vocab_multiple) * vocab_multiple
        self.vocabulary = Vocabulary(vocabulary.true_size, padded_vocab_size)
        rows = source_rows(source)
        accounting = match_source_tensors(source, rows, DEFAULT_MATCH_OPTIONS)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        self._duplicates = find_duplicates(source, accounting.checks, verify=verify)
        config = with_vocabulary(source.config, self.vocabulary)
        self.manifest: Mapping[str, Any] = {
            "config": config, "tied": accounting.is_tied, "scan": True, "scan_axis": 0,
            "rules": source.tree_manifest.get("rules", ()),
        }  # fmt: skip
        sizes = source.family.sizes(source.config)
        axis_maps = {path: bind_row(row, sizes, {VOCAB_ATOM: padded_vocab_size}) for path, row in rows.items()}
        self._leaves = _group_by_leaf(accounting.uses, axis_maps, tensors)
        is_decoded = any(isinstance(blob, CachedBlob) for blob in source.blobs)
        self.leaves = {
            name: checkpoint_store.LeafSpec(
                leaf.axis_map.leaf_shape,
                _common_dtype(leaf),
                _read_unit(leaf, is_whole=is_decoded or (verify and _has_digests(leaf))),
            )
            for name, leaf in self._leaves.items()
        }
        self.is_remote = bool(source.remote_blobs)
        self.source, self._verify = source, verify
        self.read_nbytes, self._count_lock = 0, threading.Lock()
        self._files = open_blobs(without_read_ahead(source.byte_sources))
        self._num_threads = 1 if is_decoded else MAX_THREADS  # decoders share a cache
        self._max_gap_nbytes = 1 if self.is_remote else MIN_RUN_NBYTES  # a remote gap belongs to another process
        self._shared_tensors = {name for name, uses in accounting.uses.items() if len(uses) > 1}
        self._buffers = BufferPool(Budget(self._num_threads * BUFFER_NBYTES, BUFFER_NBYTES, self._num_threads))

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.__exit__(exc_type, error, traceback)

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

        Only the byte ranges of the boxes are read, in threads with small buffers. A tensor with recorded digests is
        read completely if the reader verifies: its digests are those of all of its bytes.

        Args:
            name: Dotted name of the leaf.
            parts: Arrays to fill, by their boxes of the leaf.

        Raises:
            PrepError: A file is broken, a tensor is damaged, or a head that should equal the embedding differs from it;
                the arrays must not be used then.
        """
        leaf = self._leaves[name]
        for array in parts.values():
            array.fill(0)
        errors = run_jobs(self._jobs(leaf, parts), self._run_job, self._buffers, self._num_threads)
        if errors:
            raise errors[0]

    def _jobs(self, leaf: _LeafTensors, parts: BoxArrays) -> Iterator[TensorJob]:
        """Yield the reads of all tensors with elements in the boxes."""
        targets: dict[str, list[Target]] = {}
        for box, array in parts.items():
            for part in leaf_box_parts(leaf.axis_map, box, leaf.unscanned_index):
                targets.setdefault(part.tensor_name, []).append(Target(leaf.axis_map, part, array))
        for name, tensor_targets in targets.items():
            yield from tensor_jobs(
                leaf.tensors[name],
                tensor_targets,
                duplicates=self._duplicates.get(name, ()),
                is_checked=self._verify,
                max_gap_nbytes=self._gap_nbytes(name),
            )

    def _gap_nbytes(self, tensor_name: str) -> int:
        """Return the size from which gaps between the runs of a window are not read."""
        is_shared = self.is_remote and tensor_name in self._shared_tensors
        return SHARED_GAP_NBYTES if is_shared else self._max_gap_nbytes

    def _run_job(self, job: TensorJob, buffer: ByteArray) -> None:
        """Read a window or a whole tensor, and count its bytes."""
        if job.window is None:
            nbytes = read_checked(job, self.source, self._files, buffer)
        else:
            nbytes = self._read_window(job, job.window, buffer)
        with self._count_lock:
            self.read_nbytes += nbytes

    def _read_window(self, job: TensorJob, window: Box, buffer: ByteArray) -> int:
        try:
            max_gap_nbytes = self._gap_nbytes(job.tensor.name)
            return read_window(job, window, self._files, buffer, max_gap_nbytes=max_gap_nbytes)
        except UnequalDuplicateError as error:
            check_equal(self.source, EqualityCheck(error.duplicate.name, job.tensor.name))
            raise PrepError(f"{self.source.display_name} changed while it was read") from error


def _group_by_leaf(
    uses_by_tensor: Mapping[str, tuple[TensorUse, ...]],
    axis_maps: Mapping[str, AxisMap],
    tensors: Mapping[str, SourceTensor],
) -> dict[str, _LeafTensors]:
    tensors_by_leaf: dict[str, dict[str, SourceTensor]] = {}
    rows: dict[str, tuple[AxisMap, dict[str, int]]] = {}
    for name, uses in uses_by_tensor.items():
        for use in uses:
            leaf, axis_map, indices = f"{PARAMS}.{use.path}", axis_maps[use.parameter], dict(use.stacked_indices)
            tensors_by_leaf.setdefault(leaf, {})[name] = tensors[name]
            rows[leaf] = axis_map, {factor.atom: indices[factor.atom] for factor in axis_map.unscanned_factors}
    return {leaf: _LeafTensors(*rows[leaf], leaf_tensors) for leaf, leaf_tensors in tensors_by_leaf.items()}


def _has_digests(leaf: _LeafTensors) -> bool:
    return any(tensor.digests for tensor in leaf.tensors.values())


def _read_unit(leaf: _LeafTensors, *, is_whole: bool) -> tuple[int, ...]:
    """Return the shape of the boxes of a leaf that are read as a whole: one index of each tensor's first dim.

    Args:
        leaf: The leaf.
        is_whole: Whether tensors are read as a whole.
    """
    stacked = {factor.atom for factor in leaf.axis_map.stacked_factors}
    free = [factor.atom for dim in leaf.axis_map.source_dims for factor in dim.factors if factor.fixed is None]
    rows = "" if is_whole else next(iter(free), "")

    def extent(dim: tuple[Factor, ...]) -> int:
        factors = [factor for factor in dim if factor.atom not in stacked]
        inner = factors[1:] if factors and factors[0].atom == rows else factors
        return math.prod(factor.extent for factor in inner)

    return tuple(extent(dim) for dim in leaf.axis_map.leaf_dims)


def _common_dtype(leaf: _LeafTensors) -> str:
    """Return the dtype of a leaf's tensors; if they differ, a float dtype that holds all their values."""
    dtypes = {tensor.dtype for tensor in leaf.tensors.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    return "float64" if "float64" in dtypes else "float32"
