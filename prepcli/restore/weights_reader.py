"""`WeightsReader`: reads parameters of any source into arrays, in the leaf layout of `save-init`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import Box, volume
from prepcli.algebra.strided_copies import leaf_box_parts
from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.observer import NullProgress
from prepcli.engine import checkpoint_store
from prepcli.engine.blobs import CachedBlob, open_blobs
from prepcli.engine.compare import compare_streams
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import EqualityCheck
from prepcli.planning.state_names import PARAMS
from prepcli.planning.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    VOCAB_ATOM,
    TensorMatch,
    TensorUse,
    not_equal_error,
)
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.restore.digest_checks import (
    CHECK_MEMORY_NBYTES,
    check_before_reading,
    num_rows,
    row_stream,
)
from prepcli.restore.item_reader import MIN_RUN_NBYTES
from prepcli.restore.leaf_reader import BoxArrays, LeafReader
from prepcli.restore.tensor_jobs import (
    BUFFER_NBYTES,
    Target,
    TensorRead,
    UnequalDuplicateError,
    read_checked,
    read_window,
    tensor_jobs,
)
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_axis_maps
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import MAX_READ_THREADS, MIN_READ_AHEAD_NBYTES
from prepcli.stores.paths import is_remote, without_read_ahead

# Duplicates of each tensor, by its name. Tensors without duplicates are absent.
Duplicates = Mapping[str, Sequence[SourceTensor]]
# Each thread has a buffer of 8 MiB.
MAX_THREADS = 4
# In a remote tensor that several leaves share, smaller gaps between the runs of a leaf are read too. Requests
# without the gaps would not be faster.
SHARED_GAP_NBYTES = MIN_READ_AHEAD_NBYTES


@dataclass(frozen=True, slots=True)
class _LeafTensors:
    """A leaf and its tensors."""

    axis_map: AxisMap
    # Index of the leaf along axes that are not stacked, e.g. its layer. Empty if all axes are stacked.
    unscanned_index: Mapping[str, int]
    tensors: dict[str, SourceTensor]


class WeightsReader(LeafReader):
    """CheckpointReader of the parameters of a source, with layers stacked on axis 0.

    Attributes:
        source: The checkpoint.
        manifest: The model's facts, as a manifest would record them.
        leaves: Shape, dtype and read unit of each leaf, by dotted name.
        is_remote: Whether the source's files are on a server.
        vocabulary: Vocabulary sizes of the leaves, padding included.
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
        # Rounded up, e.g. 50257 rows and a multiple of 128: 393 * 128 = 50304.
        padded_vocab_size = -(-vocabulary.stored_size // vocab_multiple) * vocab_multiple
        self.vocabulary = Vocabulary(vocabulary.true_size, padded_vocab_size)
        rows = source_axis_maps(source)
        match = match_source_tensors(source, rows, DEFAULT_MATCH_OPTIONS)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        self._duplicates = find_duplicates(source, match.checks, verify=verify)
        config = source.config
        if not source.family.is_verbatim:
            config = with_vocabulary(config, self.vocabulary)
        self.manifest = Manifest(
            config=config,
            tied=match.is_tied,
            scan=True,
            scan_axis=0,
            rules=source.tree_manifest.rules,
            dropped=_dropped_records(source, match),
        )
        sizes = source.family.sizes(source.config)
        padded = {VOCAB_ATOM: padded_vocab_size}
        axis_maps = {path: bind_row(row, sizes, padded) for path, row in rows.items()}
        self._leaves = _group_by_leaf(match.uses, axis_maps, tensors)
        is_decoded = any(isinstance(blob, CachedBlob) for blob in source.blobs)
        self.leaves: dict[str, checkpoint_store.LeafSpec] = {}
        for name, leaf in self._leaves.items():
            # A digest covers a whole tensor, and a decoder starts at the first byte of a chunk.
            is_whole = is_decoded or (verify and _has_digests(leaf))
            self.leaves[name] = checkpoint_store.LeafSpec(
                leaf.axis_map.leaf_shape,
                _common_dtype(leaf),
                _read_unit_shape(leaf, is_whole=is_whole),
            )
        self.is_remote = is_remote(source.files)
        self.source = source
        self._verify = verify
        if verify:
            # Tensors with digests of their own are compared while they are read.
            transformed = [tensors[name] for name in match.uses if tensors[name].made_from]
            streams = [row_stream(tensor, (0, num_rows(tensor))) for tensor in transformed]
            check_before_reading(source, streams, CHECK_MEMORY_NBYTES, NullProgress())
        super().__init__(
            open_blobs(without_read_ahead(source.byte_sources)),
            num_threads=_thread_count(is_decoded=is_decoded, is_remote=self.is_remote),
            buffer_nbytes=BUFFER_NBYTES,
        )
        # In a remote file, another process of the job requests the bytes of a gap. The store would send them twice.
        self._min_skipped_gap_nbytes = 1 if self.is_remote else MIN_RUN_NBYTES
        self._shared_tensors = {name for name, uses in match.uses.items() if len(uses) > 1}

    def __enter__(self) -> WeightsReader:
        return self

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

        Only the byte ranges of the boxes are read, in threads with small buffers. A tensor with recorded digests is
        read completely if the reader verifies: its digests cover all of its bytes.

        Args:
            name: Dotted name of the leaf.
            parts: Arrays to fill, by their boxes of the leaf.

        Raises:
            PrepError: A file is broken, a tensor is damaged, or a head differs from its embedding.
                The arrays must not be used then.
        """
        leaf = self._leaves[name]
        for box, array in parts.items():
            # Zeros in arrays without padding would cost one more pass over all their pages, before the first read.
            if _has_padding(leaf, box):
                array.fill(0)
        errors = self.run_reads(self._leaf_jobs(leaf, parts), self._run_job)
        if errors:
            raise errors[0]

    def _leaf_jobs(self, leaf: _LeafTensors, parts: BoxArrays) -> Iterator[TensorRead]:
        """Yield the reads of all tensors with elements in the boxes."""
        targets: dict[str, list[Target]] = {}
        for box, array in parts.items():
            for part in leaf_box_parts(leaf.axis_map, box, leaf.unscanned_index):
                target = Target(leaf.axis_map, part, array)
                targets.setdefault(part.tensor_name, []).append(target)
        for name, tensor_targets in targets.items():
            yield from tensor_jobs(
                leaf.tensors[name],
                tensor_targets,
                duplicates=self._duplicates.get(name, ()),
                is_checked=self._verify,
                min_skipped_gap_nbytes=self._skipped_gap_nbytes(name),
            )

    def _skipped_gap_nbytes(self, tensor_name: str) -> int:
        """Return the size of the smallest skipped gap between runs. Smaller gaps are read too."""
        is_shared = self.is_remote and tensor_name in self._shared_tensors
        return SHARED_GAP_NBYTES if is_shared else self._min_skipped_gap_nbytes

    def _run_job(self, job: TensorRead, buffer: ByteArray) -> int:
        """Read a window or a whole tensor. Return the number of bytes."""
        if job.window is None:
            return read_checked(job, self.source, self._files, buffer)
        return self._read_window(job, job.window, buffer)

    def _read_window(self, job: TensorRead, window: Box, buffer: ByteArray) -> int:
        try:
            min_skipped_gap_nbytes = self._skipped_gap_nbytes(job.tensor.name)
            return read_window(
                job, window, self._files, buffer, min_skipped_gap_nbytes=min_skipped_gap_nbytes
            )
        except UnequalDuplicateError as error:
            # Raises the error for unequal tensors. If they are equal now, a file changed meanwhile.
            check_equal(self.source, EqualityCheck(error.duplicate_tensor.name, job.tensor.name))
            what = f"{self.source.display_name} changed while it was read"
            why = f"{error.duplicate_tensor.name} and {job.tensor.name} differed, and are equal now"
            raise PrepError(what, why, RERUN_HINT) from error


def _dropped_records(source: Source, match: TensorMatch) -> list[Mapping[str, object]]:
    """Return the records of the tensors that the checkpoint has lost before, or that no leaf takes."""
    records = [*(source.manifest or NO_MANIFEST).earlier_drops.dropped]
    records += [tensor.record(source.names.full_name(tensor.name)) for tensor in match.dropped]
    return records


def _has_padding(leaf: _LeafTensors, box: Box) -> bool:
    """Return whether a box of a leaf has elements of no tensor."""
    num_filled = 0
    for part in leaf_box_parts(leaf.axis_map, box, leaf.unscanned_index):
        num_filled += math.prod(stop - start for start, stop in part.atom_ranges.values())
    return num_filled != volume(box)


def _thread_count(*, is_decoded: bool, is_remote: bool) -> int:
    # Decoders share a cache.
    if is_decoded:
        return 1
    return MAX_READ_THREADS if is_remote else MAX_THREADS


def _group_by_leaf(
    uses_by_tensor: Mapping[str, tuple[TensorUse, ...]],
    axis_maps: Mapping[str, AxisMap],
    tensors: Mapping[str, SourceTensor],
) -> dict[str, _LeafTensors]:
    leaves: dict[str, _LeafTensors] = {}
    for name, uses in uses_by_tensor.items():
        for use in uses:
            path = f"{PARAMS}.{use.path}"
            if path not in leaves:
                axis_map = axis_maps[use.parameter]
                indices = dict(use.stacked_indices)
                unscanned = [factor.atom for factor in axis_map.unscanned_factors]
                unscanned_index = {atom: indices[atom] for atom in unscanned}
                leaves[path] = _LeafTensors(axis_map, unscanned_index, {})
            leaves[path].tensors[name] = tensors[name]
    return leaves


def _has_digests(leaf: _LeafTensors) -> bool:
    return any(tensor.digests for tensor in leaf.tensors.values())


def _read_unit_shape(leaf: _LeafTensors, *, is_whole: bool) -> tuple[int, ...]:
    """Return the read unit of a leaf: the shape of one index of each tensor's first dim.

    Args:
        leaf: The leaf.
        is_whole: Whether tensors are read as a whole.
    """
    # The unit is one index of the tensor's first axis. Example: the tensor (heads head_dim) embed of a leaf
    # [layers, embed, heads, head_dim] has the unit [1, embed, 1, head_dim].
    single = {factor.atom for factor in leaf.axis_map.stacked_factors}
    rows = ""
    if not is_whole:
        rows = _outermost_axis(leaf.axis_map)
    unit: list[int] = []
    for dim in leaf.axis_map.leaf_dims:
        factors = [factor for factor in dim if factor.atom not in single]
        if factors and factors[0].atom == rows:
            del factors[0]
        unit.append(math.prod(factor.extent for factor in factors))
    return tuple(unit)


def _outermost_axis(axis_map: AxisMap) -> str:
    """Return the name of the tensor's first axis, or an empty text if every axis has a fixed index (`qkv=0`)."""
    for dim in axis_map.source_dims:
        for factor in dim.factors:
            if factor.fixed is None:
                return factor.atom
    return ""


def _common_dtype(leaf: _LeafTensors) -> str:
    """Return the dtype of a leaf's tensors, or a float dtype for all their values if they differ."""
    dtypes = {tensor.dtype for tensor in leaf.tensors.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    return "float64" if "float64" in dtypes else "float32"


# Stored duplicates of tensors, such as the head of a tied model. They must equal their originals.


def find_duplicates(source: Source, checks: Sequence[EqualityCheck], *, verify: bool) -> Duplicates:
    """Return the duplicates to compare byte by byte while parts of their originals are read.

    A tensor with digests to check is always read completely. Its duplicates are compared here: by their digests, or by
    their bytes if the digests differ.

    Args:
        source: The checkpoint.
        checks: Each duplicate with its original.
        verify: Whether tensors with digests are compared with them when they are read.

    Raises:
        PrepError: A duplicate differs.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    duplicates: dict[str, list[SourceTensor]] = {}
    for check in checks:
        duplicate = tensors[check.name]
        original = tensors[check.duplicate_of]
        # A window of the original is read together with the same window of the duplicate, so that both
        # are read once. Whole tensors are compared by digests alone.
        if not (verify and original.digests):
            duplicates.setdefault(original.name, []).append(duplicate)
        elif duplicate.digests != original.digests:
            check_equal(source, check)
    return duplicates


def check_equal(source: Source, check: EqualityCheck) -> None:
    """Read a tensor and its duplicate.

    Raises:
        PrepError: They differ. The error has the number of differences and the first one.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    pair = [tensors[name] for name in (check.name, check.duplicate_of)]
    result = compare_streams(
        source.byte_sources,
        row_stream(pair[0], (0, num_rows(pair[0]))),
        blobs_b=source.byte_sources,
        stream_b=row_stream(pair[1], (0, num_rows(pair[1]))),
    )
    if result.count:
        first = f"{list(result.index)}: {result.value_a}, {result.value_b}"
        difference = (
            f"{count_text(result.count, 'value differs', 'values differ')}, the first at {first}"
        )
        display_names = {tensor.name: source.names.display_name(tensor.name) for tensor in pair}
        raise not_equal_error(
            source.family, check, display_names=display_names, difference=difference
        )
