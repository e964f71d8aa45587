"""`WeightsReader`: reads parameters of any source into arrays, in the leaf layout that `save-init` would write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from prepcli.engine.blobs import open_blobs
from prepcli.engine.compare import compare_streams
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, VOCAB_ATOM, TensorUse, not_equal_error
from prepcli.planning.boxes import Box
from prepcli.planning.plan import EqualityCheck, Stream
from prepcli.planning.state_names import PARAMS
from prepcli.planning.strided_copies import StridedCopy, leaf_box_copies
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.remote.remote_files import RemoteBlob
from prepcli.restore.digest_checks import check_tensor
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from trainer.models import checkpoint_store
from trainer.models.axis_map import AxisMap, bind_row

BoxArrays = Mapping[Box, np.ndarray]


@dataclass(frozen=True, slots=True)
class _LeafTensors:
    """A leaf and its tensors."""

    axis_map: AxisMap
    unscanned_index: Mapping[str, int]  # of a leaf that is one of several, such as one layer's
    tensors: Mapping[str, SourceTensor]


class WeightsReader:
    """CheckpointReader of the parameters of a source, with layers stacked on axis 0.

    Attributes:
        manifest: The model's facts, as a manifest would record them.
        leaves: Shape, dtype and read unit of each leaf, by dotted name.
        is_remote: Whether the source's files are on a server.
        read_nbytes: Bytes of tensors read so far.
    """

    def __init__(self, source: Source, vocab_multiple: int = 1, verify: bool = True) -> None:
        """Match the tensors of a source with its family's axis-map rows and open its files.

        Args:
            source: The checkpoint.
            vocab_multiple: Pad the vocabulary with zeros to a multiple of this.
            verify: Check each tensor against the digests in the source's manifest.

        Raises:
            PrepError: Tensors are missing or of another shape, or a head that should equal the embedding differs.
        """
        vocabulary = source.vocabulary()
        padded_vocab_size = -(-vocabulary.stored_size // vocab_multiple) * vocab_multiple
        rows = source_rows(source)
        accounting = match_source_tensors(source, rows, DEFAULT_MATCH_OPTIONS)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        for check in accounting.checks:
            _check_equal(source, check, tensors)
        config = with_vocabulary(source.config, Vocabulary(vocabulary.true_size, padded_vocab_size))
        self.manifest: Mapping[str, Any] = {
            "config": config, "tied": accounting.is_tied, "scan": True, "scan_axis": 0,
            "rules": source.tree_manifest.get("rules", ()),
        }  # fmt: skip
        sizes = source.family.sizes(source.config)
        axis_maps = {path: bind_row(row, sizes, {VOCAB_ATOM: padded_vocab_size}) for path, row in rows.items()}
        self._leaves = _group_by_leaf(accounting.uses, axis_maps, tensors)
        self.leaves = {
            name: checkpoint_store.LeafSpec(leaf.axis_map.leaf_shape, _common_dtype(leaf), _read_unit(leaf))
            for name, leaf in self._leaves.items()
        }
        self.is_remote = any(isinstance(blob, RemoteBlob) for blob in source.byte_sources)
        self.read_nbytes = 0
        self._source, self._verify = source, verify
        self._files = open_blobs(source.byte_sources)
        self._buffers = allocate_run_buffers()

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.__exit__(exc_type, error, traceback)

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

        One whole tensor is in memory at a time.

        Args:
            name: Dotted name of the leaf.
            parts: Arrays to fill, by their boxes of the leaf.

        Raises:
            PrepError: A file is broken or a tensor is damaged.
        """
        leaf = self._leaves[name]
        for array in parts.values():
            array.fill(0)
        copies_by_tensor: dict[str, list[tuple[StridedCopy, np.ndarray]]] = {}
        for box, array in parts.items():
            for tensor_name, copy in leaf_box_copies(
                leaf.axis_map, box, itemsize=1, unscanned_indices=leaf.unscanned_index
            ):
                copies_by_tensor.setdefault(tensor_name, []).append((copy, array))
        for tensor_name, copies in copies_by_tensor.items():
            values = self._read_tensor(leaf.tensors[tensor_name])
            for copy, array in copies:
                _copy_elements(copy, values, array)

    def _read_tensor(self, tensor: SourceTensor) -> np.ndarray:
        """Read all elements of a tensor in C order and check them against its digests."""
        raw = np.empty(tensor.nbytes, np.uint8)
        for start, run in read_values(self._files, _stream(tensor), buffers=self._buffers):
            raw[start : start + run.size] = run
        self.read_nbytes += tensor.nbytes
        if self._verify:
            check_tensor(self._source, tensor, raw)
        return raw.view(numpy_dtype(tensor.dtype))


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


def _read_unit(leaf: _LeafTensors) -> tuple[int, ...]:
    """Return the shape of the part of a leaf that one tensor fills: tensors are read as a whole."""
    stacked = {factor.atom for factor in leaf.axis_map.stacked_factors}
    return tuple(
        math.prod(factor.extent for factor in dim if factor.atom not in stacked) for dim in leaf.axis_map.leaf_dims
    )


def _common_dtype(leaf: _LeafTensors) -> str:
    """Return the dtype of a leaf's tensors; if they differ, a float dtype that holds all their values."""
    dtypes = {tensor.dtype for tensor in leaf.tensors.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    return "float64" if "float64" in dtypes else "float32"


def _copy_elements(copy: StridedCopy, tensor: np.ndarray, array: np.ndarray) -> None:
    """Copy elements of a tensor into an array; offsets and steps of the copy are in elements."""
    shape = [*(count for count, _, _ in copy.dims), copy.width]
    tensor_steps = [*(tensor_step for _, tensor_step, _ in copy.dims), 1]
    array_steps = [*(array_step for _, _, array_step in copy.dims), 1]
    source = _strided_view(tensor, copy.tensor_offset, shape, tensor_steps)
    _strided_view(array.reshape(-1), copy.file_offset, shape, array_steps)[...] = source


def _strided_view(flat: np.ndarray, start: int, shape: list[int], steps: list[int]) -> np.ndarray:
    item_nbytes = flat.itemsize
    return np.ndarray(shape, flat.dtype, flat, start * item_nbytes, [step * item_nbytes for step in steps])


def _stream(tensor: SourceTensor) -> Stream:
    """Return a read-only stream of a whole tensor."""
    rows = (0, tensor.shape[0] if tensor.shape else 1)
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())


def _check_equal(source: Source, check: EqualityCheck, tensors: Mapping[str, SourceTensor]) -> None:
    """Raise PrepError unless a tensor equals its supposed duplicate."""
    pair = [tensors[name] for name in (check.name, check.duplicate_of)]
    result = compare_streams(
        source.byte_sources, _stream(pair[0]), blobs_b=source.byte_sources, stream_b=_stream(pair[1])
    )
    if result.count:
        first = f"{list(result.index)}: {result.value_a}, {result.value_b}"
        difference = f"{result.count:,} values differ, the first at {first}"
        display_names = {tensor.name: source.names.display_name(tensor.name) for tensor in pair}
        raise not_equal_error(source.family, check, display_names=display_names, difference=difference)
