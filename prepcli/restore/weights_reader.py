"""`WeightsReader`: reads parameters of any source into arrays, in the leaf layout of `save-init`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import Box, Range, full_box, split_merged_range, volume
from prepcli.algebra.strided_copies import leaf_box_parts, tensor_box
from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.observer import NullProgress
from prepcli.engine.blobs import DerivedArrays, open_blobs
from prepcli.engine.digest import TensorDigest, algorithm_of
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import compare_streams, read_values
from prepcli.formats.manifest import NO_MANIFEST, RECREATE_HINT
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import EqualityCheck, Stream
from prepcli.planning.tensors import PARAMS, LeafSpec, itemsize
from prepcli.restore.box_reads import (
    MIN_GAP_NBYTES,
    PIECE_NBYTES,
    BoxArrays,
    BoxReader,
    Target,
    UnequalDuplicateError,
    WindowRead,
    file_strides,
    merge_windows,
    split_buffer,
    split_window,
)
from prepcli.restore.digest_checks import (
    CHECK_MEMORY_NBYTES,
    check_before_reading,
    damaged_error,
    num_rows,
    row_stream,
)
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, source_rows
from prepcli.sources.tensor_match import (
    DEFAULT_MATCH_OPTIONS,
    VOCAB_ATOM,
    TensorUse,
    Vocabulary,
    not_equal_error,
    with_vocabulary,
)
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


class WeightsReader(BoxReader):
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
        """
        vocabulary = source.vocabulary()
        # Rounded up, e.g. 50257 rows and a multiple of 128: 393 * 128 = 50304.
        padded_vocab_size = -(-vocabulary.stored_size // vocab_multiple) * vocab_multiple
        self.vocabulary = Vocabulary(vocabulary.true_size, padded_vocab_size)
        rows = source_rows(source)
        match = match_source_tensors(source, rows, DEFAULT_MATCH_OPTIONS)
        tensors = {tensor.name: tensor for tensor in source.tensors}
        self._duplicates = find_duplicates(source, match.checks, verify=verify)
        config = source.config
        if not source.family.is_verbatim:
            config = with_vocabulary(config, self.vocabulary)
        # The tensors that the checkpoint has lost before, and that no leaf takes.
        dropped = [tensor.record(source.names.full_name(tensor.name)) for tensor in match.dropped]
        self.manifest = Manifest(
            config=config,
            tied=match.is_tied,
            scan=True,
            scan_axis=0,
            rules=source.tree_manifest.rules,
            dropped=[*(source.manifest or NO_MANIFEST).earlier_drops.dropped, *dropped],
        )
        sizes = source.family.sizes(source.config)
        padded = {VOCAB_ATOM: padded_vocab_size}
        axis_maps = {path: bind_row(row, sizes, padded) for path, row in rows.items()}
        self._leaves = _group_by_leaf(match.uses, axis_maps, tensors)
        is_decoded = any(isinstance(blob, DerivedArrays) for blob in source.blobs)
        self.leaves: dict[str, LeafSpec] = {}
        for name, leaf in self._leaves.items():
            # A digest covers a whole tensor, and a decoder starts at the first byte of a chunk.
            has_digests = any(tensor.digests for tensor in leaf.tensors.values())
            is_whole = is_decoded or (verify and has_digests)
            dtypes = {tensor.dtype for tensor in leaf.tensors.values()}
            if len(dtypes) == 1:
                dtype = dtypes.pop()
            else:
                dtype = "float64" if "float64" in dtypes else "float32"
            self.leaves[name] = LeafSpec(
                leaf.axis_map.leaf_shape,
                dtype,
                _read_unit_shape(leaf, is_whole=is_whole),
            )
        in_store = is_remote(source.files)
        num_threads = MAX_READ_THREADS if in_store else MAX_THREADS
        if is_decoded:
            # Decoders share a cache.
            num_threads = 1
        self.source = source
        self._verify = verify
        if verify:
            # Tensors with digests of their own are compared while they are read.
            transformed = [tensors[name] for name in match.uses if tensors[name].made_from]
            streams = [row_stream(tensor, (0, num_rows(tensor))) for tensor in transformed]
            check_before_reading(source, streams, CHECK_MEMORY_NBYTES, NullProgress())
        super().__init__(
            open_blobs(without_read_ahead(source.byte_sources)),
            num_threads=num_threads,
            is_remote=in_store,
        )
        self._shared_tensors = {name for name, uses in match.uses.items() if len(uses) > 1}

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array (C order) with its box of a leaf, cast to the array's dtype.

        Only the byte ranges of the boxes are read, in threads with small buffers. A tensor with recorded digests is
        read completely if the reader verifies: its digests cover all of its bytes.

        Raises:
            PrepError: A file is broken, a tensor is damaged, or a head differs from its embedding.
                The arrays must not be used then.
        """
        leaf = self._leaves[name]
        for box, array in parts.items():
            # Zeros in arrays without padding would cost one more pass over all their pages, before the first read.
            num_filled = 0
            for part in leaf_box_parts(leaf.axis_map, box, leaf.unscanned_index):
                num_filled += math.prod(stop - start for start, stop in part.atom_ranges.values())
            if num_filled != volume(box):
                array.fill(0)
        errors = self.run_reads(self._leaf_jobs(leaf, parts), self._run_job)
        if errors:
            raise errors[0]

    def _leaf_jobs(
        self, leaf: _LeafTensors, parts: BoxArrays
    ) -> Iterator[WindowRead | CheckedRead]:
        """Yield the reads of all tensors with elements in the boxes."""
        targets: dict[str, list[Target]] = {}
        for box, array in parts.items():
            for part in leaf_box_parts(leaf.axis_map, box, leaf.unscanned_index):
                target = Target(leaf.axis_map, part, array)
                targets.setdefault(part.tensor_name, []).append(target)
        for name, tensor_targets in targets.items():
            tensor = leaf.tensors[name]
            if self._verify and tensor.digests:
                yield CheckedRead(tensor, tensor_targets)
            else:
                duplicates = [
                    duplicate.placement for duplicate in self._duplicates.get(tensor.name, ())
                ]
                # In a remote file, another process of the job requests the bytes of a gap. The store
                # would send them twice.
                min_gap_nbytes = 1 if self.is_remote else MIN_GAP_NBYTES
                if self.is_remote and tensor.name in self._shared_tensors:
                    min_gap_nbytes = SHARED_GAP_NBYTES
                item_nbytes = itemsize(tensor.dtype)
                # With duplicates, a window and the same window of the duplicate share one buffer.
                max_volume = PIECE_NBYTES // (2 if duplicates else 1) // item_nbytes
                axis_strides = file_strides(tensor.placement, tensor.shape, item_nbytes)
                boxes = [
                    tensor_box(target.axis_map, target.part.atom_ranges)
                    for target in tensor_targets
                ]
                for merged in merge_windows(boxes, axis_strides, min_gap_nbytes):
                    for window in split_window(merged, axis_strides, max_volume):
                        yield WindowRead(
                            tensor.name,
                            tensor.dtype,
                            tensor.placement,
                            window,
                            tensor_targets,
                            min_gap_nbytes,
                            duplicates,
                        )

    def _run_job(self, job: WindowRead | CheckedRead, buffer: ByteArray) -> int:
        """Read a window or a whole tensor. Return the number of bytes."""
        if isinstance(job, CheckedRead):
            tensor = job.tensor
            dtype = numpy_dtype(tensor.dtype)
            read_half, ordered_half = split_buffer(buffer)
            buffers = (read_half[:PIECE_NBYTES], ordered_half[:PIECE_NBYTES])
            for rows, recorded_digest in _digested_rows(tensor):
                digest = TensorDigest(algorithm=algorithm_of(recorded_digest))
                stream = Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
                for start, run in read_values(self._files, stream, buffers=buffers):
                    digest.update(run.data)
                    # The run is a range of the flat tensor. The windows are the boxes of this range, in C order.
                    values = run.view(dtype)
                    first = start // dtype.itemsize
                    windows: Iterable[Box] = ((),)
                    if tensor.shape:
                        windows = split_merged_range((first, first + values.size), tensor.shape)
                    filled = 0
                    for window in windows:
                        count = volume(window)
                        for target in job.targets:
                            target.fill(window, values[filled : filled + count])
                        filled += count
                if recorded_digest and digest.text() != recorded_digest:
                    raise damaged_error(self.source, tensor, RECREATE_HINT)
            return tensor.nbytes
        try:
            return self.read_window(job, buffer)
        except UnequalDuplicateError as error:
            duplicate = self._duplicates[job.name][error.number].name
            # Raises the error for unequal tensors. If they are equal now, a file changed meanwhile.
            check_equal(self.source, EqualityCheck(duplicate, job.name))
            what = f"{self.source.display_name} changed while it was read"
            why = f"{duplicate} and {job.name} differed, and are equal now"
            raise PrepError(what, why, RERUN_HINT) from error


@dataclass(frozen=True, slots=True)
class CheckedRead:
    """A read of a whole tensor into targets, compared with its digests."""

    tensor: SourceTensor
    targets: Sequence[Target]


def _digested_rows(tensor: SourceTensor) -> Iterator[tuple[Range, str]]:
    """Yield consecutive row ranges of a tensor, each with its digest, or an empty text without one."""
    (row, stop), *_ = full_box(tensor.shape) or ((0, 1),)
    for low, high, digest in sorted(tensor.digests):
        if row < low:
            yield (row, low), ""
        yield (low, high), digest
        row = high
    if row < stop:
        yield (row, stop), ""


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


def _read_unit_shape(leaf: _LeafTensors, *, is_whole: bool) -> tuple[int, ...]:
    """Return the read unit of a leaf: the shape of one index of each tensor's first dim."""
    # The unit is one index of the tensor's first axis. Example: the tensor (heads head_dim) embed of a leaf
    # [layers, embed, heads, head_dim] has the unit [1, embed, 1, head_dim].
    single = {factor.atom for factor in leaf.axis_map.stacked_factors}
    rows = ""
    if not is_whole:
        # No axis if every one has a fixed index (`qkv=0`).
        factors = [factor for dim in leaf.axis_map.source_dims for factor in dim.factors]
        rows = next((factor.atom for factor in factors if factor.fixed is None), "")
    unit: list[int] = []
    for dim in leaf.axis_map.leaf_dims:
        factors = [factor for factor in dim if factor.atom not in single]
        if factors and factors[0].atom == rows:
            del factors[0]
        unit.append(math.prod(factor.extent for factor in factors))
    return tuple(unit)


# Stored duplicates of tensors, such as the head of a tied model. They must equal their originals.


def find_duplicates(source: Source, checks: Sequence[EqualityCheck], *, verify: bool) -> Duplicates:
    """Return the duplicates to compare byte by byte while parts of their originals are read.

    A tensor with digests to check is always read completely. Its duplicates are compared here: by their digests, or by
    their bytes if the digests differ.
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
    """Read a tensor and its duplicate."""
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
