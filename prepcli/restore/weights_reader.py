"""Leaves of any checkpoint that prep reads, as `save-init` would lay them out, into arrays: nothing is written."""

from __future__ import annotations

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
from prepcli.restore.digest_checks import check_tensor
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from trainer.models import checkpoint_store
from trainer.models.axis_map import AxisMap, bind_row

BoxArrays = Mapping[Box, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf, and the tensors that make it up."""

    row: AxisMap
    apart: Mapping[str, int]  # which one it is of those that the row stands for
    tensors: Mapping[str, SourceTensor]


class WeightsReader:
    """A state.Reader of the parameters of a source, layers stacked. `facts`: what a manifest would say of them.

    vocab_parts: the vocabulary is padded to a multiple of it, with zeros. verify: each tensor that is read is checked
    against the digests that the source's manifest records. PrepError where tensors do not add up to the
    model, or a head that is said to be the embedding is not.
    """

    def __init__(self, source: Source, vocab_multiple: int = 1, verify: bool = True) -> None:
        vocabulary = source.vocabulary()
        rows = -(-vocabulary.stored_size // vocab_multiple) * vocab_multiple
        table = source_rows(source)
        found = match_source_tensors(source, table, DEFAULT_MATCH_OPTIONS)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        for check in found.checks:
            _check_same(source, check, tensors)
        config = with_vocabulary(source.config, Vocabulary(vocabulary.true_size, rows))
        self.manifest: Mapping[str, Any] = {
            "config": config, "tied": found.is_tied, "scan": True, "scan_axis": 0,
            "rules": source.tree_manifest.get("rules", ()),
        }  # fmt: skip
        bound = {
            path: bind_row(row, source.family.sizes(source.config), {VOCAB_ATOM: rows}) for path, row in table.items()
        }
        self._leaves = _leaves(found.uses, bound, tensors)
        self.leaves = {
            name: checkpoint_store.LeafSpec(leaf.row.leaf_shape, _dtype(leaf)) for name, leaf in self._leaves.items()
        }
        self._source, self._verify = source, verify
        self._files = open_blobs(source.byte_sources)
        self._buffers = allocate_run_buffers()

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.__exit__(kind, error, at)

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of the leaf, cast to its dtype. PrepError names a broken file.

        A tensor is in memory as a whole, one at a time.
        """
        leaf = self._leaves[name]
        for array in parts.values():
            array.fill(0)
        jobs: dict[str, list[tuple[StridedCopy, np.ndarray]]] = {}
        for box, array in parts.items():
            for tensor, copy in leaf_box_copies(leaf.row, box, 1, leaf.apart):
                jobs.setdefault(tensor, []).append((copy, array))
        for tensor, found in jobs.items():
            whole = self._whole(leaf.tensors[tensor])
            for copy, array in found:
                _put(copy, whole, array)

    def _whole(self, tensor: SourceTensor) -> np.ndarray:
        """Read all elements of a tensor in C order, checked against its digests."""
        raw = np.empty(tensor.nbytes, np.uint8)
        for start, run in read_values(self._files, _stream(tensor), self._buffers):
            raw[start : start + run.size] = run
        if self._verify:
            check_tensor(self._source, tensor, raw)
        return raw.view(numpy_dtype(tensor.dtype))


def _leaves(
    uses: Mapping[str, tuple[TensorUse, ...]], bound: Mapping[str, AxisMap], tensors: Mapping[str, SourceTensor]
) -> dict[str, _Leaf]:
    found: dict[str, dict[str, SourceTensor]] = {}
    rows: dict[str, tuple[AxisMap, dict[str, int]]] = {}
    for name, of in uses.items():
        for use in of:
            leaf, row, at = f"{PARAMS}.{use.path}", bound[use.parameter], dict(use.stacked_indices)
            found.setdefault(leaf, {})[name] = tensors[name]
            rows[leaf] = row, {factor.atom: at[factor.atom] for factor in row.unscanned_factors}
    return {leaf: _Leaf(*rows[leaf], own) for leaf, own in found.items()}


def _dtype(leaf: _Leaf) -> str:
    """The dtype of its tensors; where they differ, one that holds the values of all."""
    first, *others = {tensor.dtype for tensor in leaf.tensors.values()}
    if not others:
        return first
    return "float64" if "float64" in (first, *others) else "float32"


def _put(copy: StridedCopy, tensor: np.ndarray, array: np.ndarray) -> None:
    """Elements of a tensor to their places in a part; the copy counts elements."""
    shape = [*(count for count, _, _ in copy.dims), copy.width]
    there, here = ([*(dim[side] for dim in copy.dims), 1] for side in (1, 2))
    _view(array.reshape(-1), copy.file_offset, shape, here)[...] = _view(tensor, copy.tensor_offset, shape, there)


def _view(flat: np.ndarray, start: int, shape: list[int], steps: list[int]) -> np.ndarray:
    item = flat.itemsize
    return np.ndarray(shape, flat.dtype, flat, start * item, [step * item for step in steps])


def _stream(tensor: SourceTensor) -> Stream:
    """All of a tensor, as it is read."""
    return Stream(
        tensor.name, tensor.dtype, tensor.shape, (0, tensor.shape[0] if tensor.shape else 1), tensor.placement, ()
    )


def _check_same(source: Source, check: EqualityCheck, tensors: Mapping[str, SourceTensor]) -> None:
    """PrepError unless a tensor repeats the other."""
    pair = [tensors[name] for name in (check.name, check.duplicate_of)]
    found = compare_streams(source.byte_sources, _stream(pair[0]), source.byte_sources, _stream(pair[1]))
    if found.count:
        how = f"{found.count:,} values differ, the first at {list(found.index)}: {found.value_a}, {found.value_b}"
        raise not_equal_error(
            source.family, check, {each.name: source.names.display_name(each.name) for each in pair}, how
        )
