"""Compare every bit of a checkpoint with the digests of its manifest, or with another checkpoint."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from prepcli.algebra.boxes import Range
from prepcli.commands.operations.accept import accept_files
from prepcli.commands.operations.checksum_file import check_checksum_file
from prepcli.commands.operations.comparable_sources import (
    check_contents,
    comparable_sources,
    note_unrecorded_drops,
)
from prepcli.commands.operations.compared_settings import setting_differences
from prepcli.commands.operations.inspection_options import VerifyOptions
from prepcli.commands.operations.opening import (
    CommonOptions,
    check_config_option,
    common_options,
    note_file_names,
    open_checkpoint,
    source_line,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.verification_results import (
    TensorDifference,
    TensorDistance,
    Verification,
)
from prepcli.commands.operations.verified_model import (
    VerifiedModel,
    collect_model,
    unpadded_rows,
    unpadded_shape,
    unused_tensors,
)
from prepcli.commands.operations.verify_map import first_options, is_output, mapped_options
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.observer import NullProgress, Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.engine.blobs import open_blobs
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.compare import Difference, compare_streams
from prepcli.engine.digest import digest_of_zeros
from prepcli.engine.distance import Distance, measure_distance
from prepcli.formats.again_hint import again_hint
from prepcli.formats.manifest import NO_MANIFEST, unwritten_manifest
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.plan import Stream
from prepcli.restore.digest_checks import (
    check_after_reading,
    stored_scale,
    stream_digests,
    tensor_digests,
    written_stream,
)
from prepcli.sources.dropped_tensors import with_recorded_text_part, without_recorded_drops
from prepcli.sources.locate import check_stream
from prepcli.sources.references import default_checkpoint
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.source_hints import KeptScales
from prepcli.sources.tensor_labels import TensorLabel

HEADER_CHECKS = ("headers", "file sizes")  # checks of `quick` for one checkpoint
SHAPE_CHECKS = ("names", "shapes", "dtypes")  # checks of `quick` for two checkpoints


@dataclass(frozen=True, slots=True)
class Finding:
    """Tensor, or rows of a tensor, with a failed check."""

    label: TensorLabel
    text: str  # predicate for the message, such as `is not in MODEL`
    difference: Difference | None = None  # first differing value


@public
def verify(
    checkpoint: PathLike | None = None,
    against: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[VerifyOptions],
) -> Verification:
    """Compare a checkpoint with its recorded digests, or with another checkpoint of any format.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL. Default: the only output of prep in the working
            directory.
        against: A second checkpoint. Default: the digests in the manifest.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `VerifyOptions`.

    Returns:
        The differences. A difference is not an exception: the result is False in a condition. Two checkpoints are
        compared without the padding of the vocabulary, a checkpoint and its digests with it.

    Raises:
        UsageError: An argument is invalid, `checkpoint` has no digests and `against` is missing, or it records no
            file of `accept`.
        DamagedError: A file is missing, cut short or malformed, or a settings file was changed. Changed values are
            differences. If two checkpoints are equal, but not to the recorded digests of one, it is damaged.
        PrepError: A checkpoint cannot be read, or the checkpoints are of different families.
    """
    started_s = time.monotonic()
    observer = observer_of(progress)
    request = _Request(
        replace(common_options(checkpoint, None, options), quantized="stored"),
        against=None if against is None else str(against),
        quick=options["quick"],
        strict=options["strict"],
        tolerance=options["tolerance"],
    )
    _check_pair_options(request)
    accept = [str(path) for path in options["accept"]]
    if not accept:
        result = _verify_checkpoint(request, observer)
    else:
        result = _verify_and_accept(request, accept, observer)
    return replace(result, seconds=time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _Request:
    """Request of a comparison."""

    common: CommonOptions
    against: str | None  # the second checkpoint, or None to compare with the manifest
    quick: bool  # read no values
    strict: bool  # fail on other settings too
    tolerance: float | None  # largest accepted difference of two values, or None to compare bits


def _check_pair_options(request: _Request) -> None:
    """Raise UsageError for options of pairs without a second checkpoint, or for `--tolerance` with `--quick`."""
    option = Option("tolerance")
    if request.strict and request.against is None:
        strict = Option("strict", True)
        what = text("{} requires a second checkpoint", strict)
        why = "it compares the settings of two checkpoints"
        raise usage_error(what, why, text("remove {}, or name the second checkpoint", strict))
    if request.tolerance is None:
        return
    if request.against is None:
        why = "a checkpoint and its digests are equal or not"
        what = text("{} requires a second checkpoint", option)
        raise usage_error(what, why, text("remove {}, or name the second checkpoint", option))
    if request.quick:
        what = text("{} and {} exclude each other", option, Option("quick", True))
        raise usage_error(what, "a quick check reads no values", "remove one of them")


def _verify_and_accept(request: _Request, files: Sequence[str], observer: Observer) -> Verification:
    """Verify an output with the present bytes of some files, and record their digests if nothing differs."""
    checkpoint = request.common.checkpoint or f"./{default_checkpoint(Path())}"
    accepted = accept_files(checkpoint, files)
    # The output is checked against the new records before they are written: a kill or a difference leaves the old ones.
    with unwritten_manifest(accepted.folder, accepted.data):
        result = _verify_checkpoint(request, observer)
    if not result:
        return result
    accepted.write(observer)
    return replace(result, accepted=tuple(accepted.changes))


def _verify_checkpoint(request: _Request, observer: Observer) -> Verification:
    """Compare a checkpoint with its manifest's digests, or with another checkpoint of any format and layout."""
    # Values that a scale has rounded have no way back. They are compared as they are stored, and a tolerance is for the
    # values of the model.
    kept_scales: KeptScales = "rounded" if request.tolerance is None else "none"
    if request.against is None and request.common.lock is None:
        # The way back rounds, so that it does not show each changed bit of the stored values. A lock has the digests
        # of the values after the way back.
        kept_scales = "all"
    located, source = open_checkpoint(
        first_options(request.common, request.against),
        observer,
        allow_adapters=True,
        kept_scales=kept_scales,
        notes_names=request.against is None,
    )
    check_checksum_file(source)
    if request.against is None:
        observer.note(source_line(source))
        check_config_option(request.common, source)
        check_stream(request.common.stream, located)
        return _verify_digests(collect_model(source), request, observer)
    mapped = mapped_options(_against_options(request), source.manifest)
    against_located, against_source = open_checkpoint(
        mapped, observer, allow_adapters=True, kept_scales=kept_scales, notes_names=False
    )
    check_config_option(request.common, source, against_source)
    check_stream(request.common.stream, located, against_located)
    check_contents(source, against_source)
    check_checksum_file(against_source)
    manifests = [one.manifest or NO_MANIFEST for one in (source, against_source)]
    source = with_recorded_text_part(source, manifests[1])
    against_source = with_recorded_text_part(against_source, manifests[0])
    for options, one in ((request.common, source), (mapped, against_source)):
        note_file_names(options, one, observer)
        observer.note(source_line(one))
    # An output without the dropped tensors of its source has a config without them.
    compared = without_recorded_drops(source, manifests[1])
    against_source = without_recorded_drops(against_source, manifests[0])
    for one, other in ((compared, against_source), (against_source, source)):
        note_unrecorded_drops(one, other, observer)
    settings = tuple(setting_differences(compared, against_source))
    pair = comparable_sources(compared, against_source, observer)
    a = collect_model(pair.source, pair.against)
    b = collect_model(pair.against, pair.source)
    result = _verify_pair(a, b, request, observer)
    left_out = (*pair.left_out, *unused_tensors(a, b), *unused_tensors(b, a))
    is_equal = result.is_equal and not (request.strict and (settings or left_out))
    return replace(result, is_equal=is_equal, settings=settings, left_out=left_out)


def _against_options(request: _Request) -> CommonOptions:
    """Return the options of the second checkpoint. The step and the revision belong to the first one."""
    common = request.common
    return CommonOptions(
        checkpoint=request.against,
        out=None,
        memory_nbytes=common.memory_nbytes,
        offline=common.offline,
        stream=common.stream,
        config=common.config,
        quantized=common.quantized,
        tensor_map=None if is_output(request.against) else common.tensor_map,
        # One checkpoint with the names of its file is enough: the other one is then compared by them.
        verbatim=None if common.verbatim else common.verbatim,
    )


def _verify_digests(model: VerifiedModel, request: _Request, observer: Observer) -> Verification:
    """Compare with the digests of the manifest."""
    source = model.source
    tensors = [t for t in source.all_tensors if t.digests]
    if request.quick:
        return _quick_verification(model, HEADER_CHECKS)
    if not tensors:
        name = source.display_name
        why = "it has no prep-manifest.json with digests"
        hint = text("{}", Command("verify", name, "OTHER"))
        raise usage_error(f"nothing to verify {name} against", why, hint)
    # A padded tensor has two digests: one of its true rows, and one of its padding.
    pieces = [(t, (low, high), digest) for t in tensors for low, high, digest in t.digests]
    digests = tensor_digests(
        source,
        [(t, rows) for t, rows, _ in pieces],
        request.common.memory_nbytes,
        progress=observer.progress(),
        task="verify",
        is_checked=False,
    )
    findings: list[Finding] = []
    for (tensor, rows, expected), actual in zip(pieces, digests):
        if expected != actual:
            predicate = f"rows {rows[0]}:{rows[1]} do not match their recorded digest"
            findings.append(Finding(model.labels[tensor.name], predicate))
    for tensor in model.tensors.values():
        if not tensor.digests:
            findings.append(Finding(model.labels[tensor.name], "has no digest in the manifest"))
    return replace(_make_verification(model, findings), remedy=again_hint(source.manifest))


def _tie_findings(
    model: VerifiedModel, memory_nbytes: int, observer: Observer
) -> Iterator[Finding]:
    """Yield tied heads with other values than the embedding, and other such duplicates."""
    tensors = {t.name: t for t in model.source.tensors}
    for check in model.match.checks:
        pair = [tensors[check.name], tensors[check.duplicate_of]]
        pieces = [(tensor, (0, tensor.shape[0])) for tensor in pair]
        head, embedding = tensor_digests(
            model.source,
            pieces,
            memory_nbytes,
            progress=observer.progress(),
            task="verify tied",
            is_checked=False,
        )
        if head != embedding:
            original = model.labels[check.duplicate_of].tensor
            yield Finding(model.labels[check.name], f"is tied but not equal to {original}")


def _verify_pair(
    a: VerifiedModel, b: VerifiedModel, request: _Request, observer: Observer
) -> Verification:
    """Compare two checkpoints of one family.

    Their formats and layouts may differ. Padding is not compared.
    """
    if a.source.family.name != b.source.family.name:
        why = f"{a.source.family.name} and {b.source.family.name}"
        names = f"{a.source.display_name} and {b.source.display_name}"
        hint = "name two checkpoints of one family"
        raise PrepError(f"{names} are of different families", why, hint)
    findings = list(_shape_findings(a, b, has_tolerance=request.tolerance is not None))
    if request.quick and not findings:
        return _quick_verification(a, SHAPE_CHECKS, against=b)
    memory_nbytes = request.common.memory_nbytes
    # Tensors of different shapes or dtypes have no values to compare.
    mismatched = {finding.label for finding in findings}
    names = [n for n in a.tensors if n in b.tensors and a.labels[n] not in mismatched]
    if request.tolerance is not None:
        reads = [_ReadStreams(model.source, [], []) for model in (a, b)]
        distances = list(_tensor_distances(a, b, names, reads, observer.progress()))
        for label, distance in distances:
            if not distance.max_abs <= request.tolerance:
                why = f"differs by up to {distance.max_abs:.3g}, the tolerance is {request.tolerance:g}"
                findings.append(Finding(label, why))
        if not findings:
            for read in reads:
                read.check(memory_nbytes, observer.progress())
        fields = tuple(_distance_fields(label, distance) for label, distance in distances)
        return replace(_make_verification(a, findings, against=b), distances=fields)
    if not request.quick:
        findings += _tie_findings(a, memory_nbytes, observer)
        findings += _tie_findings(b, memory_nbytes, observer)
        findings += _value_findings(a, b, names, memory_nbytes=memory_nbytes, observer=observer)
        num_different = len({finding.label for finding in findings if finding.difference})
        observer.note(f"same  {count_text(len(names) - num_different, 'tensor')}")
        for line in _padding_lines(a, b, names, memory_nbytes=memory_nbytes):
            observer.note(line)
    return _make_verification(a, findings, against=b)


def _shape_findings(
    a: VerifiedModel, b: VerifiedModel, *, has_tolerance: bool
) -> Iterator[Finding]:
    """Yield tensors missing in one checkpoint, and tensors of another dtype, shape or true vocabulary.

    With a tolerance the dtypes may differ.
    """
    for name in sorted({*a.tensors, *b.tensors}):
        label = a.labels[name] if name in a.labels else b.labels[name]
        a_tensor = a.tensors.get(name)
        b_tensor = b.tensors.get(name)
        if a_tensor is None or b_tensor is None:
            lacking = a.source.display_name if a_tensor is None else b.source.display_name
            yield Finding(label, f"is not in {lacking}")
        elif a_tensor.dtype != b_tensor.dtype and not has_tolerance:
            yield Finding(label, f"is {a_tensor.dtype} and {b_tensor.dtype}")
        elif name in a.vocab_tensors and a.true_vocab != b.true_vocab:
            yield Finding(label, f"has {a.true_vocab} and {b.true_vocab} true rows")
        elif unpadded_shape(a, a_tensor) != unpadded_shape(b, b_tensor):
            yield Finding(label, f"has shapes {list(a_tensor.shape)} and {list(b_tensor.shape)}")


@dataclass(frozen=True, slots=True)
class _ReadStreams:
    """Streams of a checkpoint, and the digests of their bytes."""

    source: Source
    streams: list[Stream]
    digests: list[str]

    def check(self, memory_nbytes: int, progress: Progress) -> None:
        """Raise DamagedError if a tensor does not match its recorded digest."""
        check_after_reading(self.source, self.streams, self.digests, memory_nbytes, progress)


def _value_findings(
    a: VerifiedModel,
    b: VerifiedModel,
    names: Sequence[str],
    *,
    memory_nbytes: int,
    observer: Observer,
) -> Iterator[Finding]:
    """Yield tensors with different values.

    Digests find them in one pass over each checkpoint, in the order of its files. Only different tensors are read a
    second time, side by side, for the first different value.

    Raises:
        DamagedError: No tensor differs, and one does not match its recorded digest.
    """
    digests_by_name: list[dict[str, str]] = []
    reads: list[_ReadStreams] = []
    has_difference = False
    for model, other in ((a, b), (b, a)):
        compared = [tensor for tensor in model.source.all_tensors if tensor.name in {*names}]
        streams: list[Stream] = []
        for tensor in compared:
            scale = _missing_scale(model, other, tensor.name)
            streams.append(
                written_stream(tensor, unpadded_rows(model, tensor), tensor.dtype, scale)
            )
        digests = stream_digests(
            model.source,
            streams,
            memory_nbytes,
            progress=observer.progress(),
            task=f"verify {model.source.display_name}",
            is_checked=False,
        )
        parsed = [parse_stream_digest(digest) for digest in digests]
        reads.append(_ReadStreams(model.source, streams, [each.read for each in parsed]))
        digests_by_name.append({t.name: each.written for t, each in zip(compared, parsed)})
    for name in names:
        if digests_by_name[0][name] == digests_by_name[1][name]:
            continue
        has_difference = True
        scale = _missing_scale(a, b, name) or _missing_scale(b, a, name)
        if scale is None:
            yield _value_finding(a, b, name)
        else:
            # The values are not side by side: one model has the values of the layout.
            predicate = f"has other values: the layout {scale.description}"
            yield Finding(a.labels[name], predicate)
    if not has_difference:
        for read in reads:
            read.check(memory_nbytes, observer.progress())


def _missing_scale(model: VerifiedModel, other: VerifiedModel, name: str) -> LayoutScale | None:
    """Return the scale of a tensor if only the other checkpoint stores it scaled, else None."""
    scale = stored_scale(other.source, name)
    if scale == stored_scale(model.source, name):
        return None
    return scale


def _value_finding(a: VerifiedModel, b: VerifiedModel, name: str) -> Finding:
    streams = [
        _row_stream(model.tensors[name], unpadded_rows(model, model.tensors[name]))
        for model in (a, b)
    ]
    difference = compare_streams(
        a.source.byte_sources, streams[0], blobs_b=b.source.byte_sources, stream_b=streams[1]
    )
    num_values = math.prod(streams[0].shape)
    first = f"{list(difference.index)}: {difference.value_a} -> {difference.value_b}"
    predicate = f"{difference.count:,} of {num_values:,} values; first at {first}"
    return Finding(a.labels[name], predicate, difference)


def _tensor_distances(
    a: VerifiedModel,
    b: VerifiedModel,
    names: Sequence[str],
    reads: Sequence[_ReadStreams],
    progress: Progress,
) -> Iterator[tuple[TensorLabel, Distance]]:
    """Yield the distance between the true rows of each tensor, and add their streams to `reads`.

    Both checkpoints are read side by side.
    """
    progress.begin("compare", sum(a.tensors[name].nbytes for name in names))
    try:
        with (
            open_blobs(a.source.byte_sources) as files_a,
            open_blobs(b.source.byte_sources) as files_b,
        ):
            for name in names:
                stream_a = _row_stream(a.tensors[name], unpadded_rows(a, a.tensors[name]))
                stream_b = _row_stream(b.tensors[name], unpadded_rows(b, b.tensors[name]))
                distance = measure_distance(files_a, stream_a, reader_b=files_b, stream_b=stream_b)
                for read, stream, digest in zip(reads, (stream_a, stream_b), distance.digests):
                    read.streams.append(stream)
                    read.digests.append(digest)
                progress.advance(a.tensors[name].nbytes)
                yield a.labels[name], distance
    finally:
        progress.end()


def _distance_fields(label: TensorLabel, distance: Distance) -> TensorDistance:
    """Return the entry of a tensor in `Verification.distances`."""
    return TensorDistance(
        label.leaf, label.tensor, distance.max_abs, distance.mean_abs, distance.cosine
    )


def _padding_lines(
    a: VerifiedModel, b: VerifiedModel, names: Sequence[str], *, memory_nbytes: int
) -> Iterator[str]:
    """Describe the padding of the vocabulary in either checkpoint."""
    for name in names:
        for model in (a, b):
            tensor = model.tensors[name]
            if name in model.vocab_tensors and tensor.shape[0] > model.true_vocab:
                is_zero = _padding_is_zeros(model, tensor, memory_nbytes)
                rows = f"rows {model.true_vocab}:{tensor.shape[0]} of {model.source.display_name} are padding"
                yield f"same  {model.labels[name]} [0:{model.true_vocab}]; {rows}{' (zeros)' if is_zero else ''}"


def _padding_is_zeros(model: VerifiedModel, tensor: SourceTensor, memory_nbytes: int) -> bool:
    rows = (model.true_vocab, tensor.shape[0])
    (digest,) = tensor_digests(
        model.source,
        [(tensor, rows)],
        memory_nbytes,
        progress=NullProgress(),
        task="padding",
        is_checked=False,
    )
    return digest == digest_of_zeros(_row_stream(tensor, rows).nbytes)


def _padding_rows(*models: VerifiedModel) -> int:
    """Return the number of padding rows of the vocabulary's tensors."""
    return sum(
        model.tensors[name].shape[0] - model.true_vocab
        for model in models
        for name in model.vocab_tensors & model.tensors.keys()
    )


def _row_stream(tensor: SourceTensor, rows: Range) -> Stream:
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())


def _make_verification(
    model: VerifiedModel, findings: Sequence[Finding], *, against: VerifiedModel | None = None
) -> Verification:
    """Return the result of a comparison of values. Without `against` it covers padding."""
    padding_rows = 0 if against is None else _padding_rows(model, against)
    num_values = 0
    for tensor in model.tensors.values():
        shape = tensor.shape if padding_rows == 0 else unpadded_shape(model, tensor)
        num_values += math.prod(shape)
    is_equal = not findings
    return Verification(
        is_equal=is_equal,
        tensors=len(model.tensors) if is_equal else None,
        values=num_values if is_equal else None,
        differences=tuple(_finding_fields(finding) for finding in findings),
        seconds=0.0,
        ignored_padding_rows=padding_rows,
        checkpoint=model.source.display_name,
        against=against.source.display_name if against is not None else None,
        total_tensors=len(model.tensors),
    )


def _quick_verification(
    model: VerifiedModel, checked: tuple[str, ...], *, against: VerifiedModel | None = None
) -> Verification:
    """Return the result of a successful check without reading values."""
    return replace(_make_verification(model, (), against=against), values=None, checked=checked)


def _finding_fields(finding: Finding) -> TensorDifference:
    """Return the entry of a finding in `Verification.differences`."""
    fields: TensorDifference = {
        "leaf": finding.label.leaf,
        "tensor": finding.label.tensor,
        "what": finding.text,
    }
    difference = finding.difference
    if difference is not None:
        fields["index"] = list(difference.index)
        fields["a"] = difference.value_a
        fields["b"] = difference.value_b
        fields["count"] = difference.count
    return fields
