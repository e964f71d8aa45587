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

from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    check_config_option,
    common_options,
    note_file_names,
    open_checkpoint,
    source_line,
)
from prepcli.commands.operations.compared_settings import setting_differences
from prepcli.commands.operations.inspection_options import VerifyOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.verification_results import (
    TensorDifference,
    TensorDistance,
    Verification,
)
from prepcli.commands.operations.verify_sources import (
    VerifiedModel,
    accept_files,
    check_checksum_file,
    check_contents,
    collect_model,
    comparable_sources,
    first_options,
    is_output,
    mapped_options,
    note_unrecorded_drops,
    unused_tensors,
)
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.observer import NullProgress, Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import tensor_digest_of_zeros
from prepcli.engine.stream_values import compare_streams, measure_distance
from prepcli.formats.manifest import NO_MANIFEST, again_hint, unwritten_manifest
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.plan import Stream
from prepcli.restore.digest_checks import (
    check_after_reading,
    recorded_streams,
    row_stream,
    stored_scale,
    stream_digests,
    written_stream,
)
from prepcli.sources.dropped_tensors import with_recorded_text_part, without_recorded_drops
from prepcli.sources.locate import check_stream
from prepcli.sources.references import KeptScales, default_checkpoint
from prepcli.sources.source import Source, SourceTensor

HEADER_CHECKS = ("headers", "file sizes")  # checks of `quick` for one checkpoint
SHAPE_CHECKS = ("names", "shapes", "dtypes")  # checks of `quick` for two checkpoints


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
    common = replace(common_options(checkpoint, None, options), quantized="stored")
    other = None if against is None else str(against)
    _check_pair_options(options, other)
    if not options["accept"]:
        result = _verify_checkpoint(common, other, options, observer)
        return replace(result, seconds=time.monotonic() - started_s)
    files = [str(path) for path in options["accept"]]
    accepted = accept_files(common.checkpoint or f"./{default_checkpoint(Path())}", files)
    # The output is checked against the new records before they are written: a kill or a difference leaves the old ones.
    with unwritten_manifest(accepted.folder, accepted.data):
        result = _verify_checkpoint(common, other, options, observer)
    if result:
        accepted.write(observer)
        result = replace(result, accepted=tuple(accepted.changes))
    return replace(result, seconds=time.monotonic() - started_s)


def _check_pair_options(options: VerifyOptions, against: str | None) -> None:
    """Raise UsageError for options of pairs without a second checkpoint, or for `--tolerance` with `--quick`."""
    tolerance = options["tolerance"]
    pair_options = (
        (Option("strict", True), options["strict"], "it compares the settings of two checkpoints"),
        (
            Option("tolerance"),
            tolerance is not None,
            "a checkpoint and its digests are equal or not",
        ),
    )
    for option, is_set, why in pair_options:
        if is_set and against is None:
            what = text("{} requires a second checkpoint", option)
            raise usage_error(what, why, text("remove {}, or name the second checkpoint", option))
    if tolerance is not None and options["quick"]:
        what = text("{} and {} exclude each other", Option("tolerance"), Option("quick", True))
        raise usage_error(what, "a quick check reads no values", "remove one of them")


def _verify_checkpoint(
    common: CommonOptions, against: str | None, options: VerifyOptions, observer: Observer
) -> Verification:
    """Compare a checkpoint with its manifest's digests, or with another checkpoint of any format and layout."""
    # Values that a scale has rounded have no way back. They are compared as they are stored, and a tolerance is for the
    # values of the model.
    kept_scales: KeptScales = "rounded" if options["tolerance"] is None else "none"
    if against is None and common.lock is None:
        # The way back rounds, so that it does not show each changed bit of the stored values. A lock has the digests
        # of the values after the way back.
        kept_scales = "all"
    located, source = open_checkpoint(
        first_options(common, against),
        observer,
        allow_adapters=True,
        kept_scales=kept_scales,
        notes_names=against is None,
    )
    check_checksum_file(source)
    if against is None:
        observer.note(source_line(source))
        if common.config is not None:
            check_config_option(source)
        if common.stream:
            check_stream(located)
        return _verify_digests(collect_model(source), common, options, observer)
    # The step, the revision and the lock belong to the first checkpoint.
    against_options = CommonOptions(
        checkpoint=against,
        out=None,
        memory_nbytes=common.memory_nbytes,
        offline=common.offline,
        stream=common.stream,
        config=common.config,
        quantized=common.quantized,
        tensor_map=None if is_output(against) else common.tensor_map,
        # One checkpoint with the names of its file is enough: the other one is then compared by them.
        verbatim=None if common.verbatim else common.verbatim,
    )
    mapped = mapped_options(against_options, source.manifest)
    against_located, against_source = open_checkpoint(
        mapped, observer, allow_adapters=True, kept_scales=kept_scales, notes_names=False
    )
    if common.config is not None:
        check_config_option(source, against_source)
    if common.stream:
        check_stream(located, against_located)
    check_contents(source, against_source)
    check_checksum_file(against_source)
    manifests = [one.manifest or NO_MANIFEST for one in (source, against_source)]
    source = with_recorded_text_part(source, manifests[1])
    against_source = with_recorded_text_part(against_source, manifests[0])
    for one_options, one in ((common, source), (mapped, against_source)):
        note_file_names(one_options, one, observer)
        observer.note(source_line(one))
    # An output without the dropped tensors of its source has a config without them.
    compared = without_recorded_drops(source, manifests[1])
    against_source = without_recorded_drops(against_source, manifests[0])
    for one, other in ((compared, against_source), (against_source, source)):
        note_unrecorded_drops(one, other, observer)
    settings = tuple(setting_differences(compared, against_source))
    compared, against_source, towers = comparable_sources(compared, against_source, observer)
    a = collect_model(compared, against_source)
    b = collect_model(against_source, compared)
    result = _verify_pair(a, b, common, options, observer)
    left_out = (*towers, *unused_tensors(a, b), *unused_tensors(b, a))
    is_equal = result.is_equal and not (options["strict"] and (settings or left_out))
    return replace(result, is_equal=is_equal, settings=settings, left_out=left_out)


def _verify_digests(
    model: VerifiedModel, common: CommonOptions, options: VerifyOptions, observer: Observer
) -> Verification:
    """Compare with the digests of the manifest."""
    source = model.source
    tensors = [t for t in source.all_tensors if t.digests]
    if options["quick"]:
        result = _make_verification(model, ())
        return replace(result, values=None, checked=HEADER_CHECKS)
    if not tensors:
        name = source.display_name
        why = "it has no prep-manifest.json with digests"
        hint = text("{}", Command("verify", name, "OTHER"))
        raise usage_error(f"nothing to verify {name} against", why, hint)
    # A padded tensor has two digests: one of its true rows, and one of its padding.
    pieces: list[tuple[SourceTensor, tuple[int, int, str]]] = []
    streams: list[Stream] = []
    for tensor in tensors:
        pieces += [(tensor, recorded) for recorded in tensor.digests]
        streams += recorded_streams(tensor)
    digests = stream_digests(
        source,
        streams,
        common.memory_nbytes,
        progress=observer.progress(),
        task="verify",
        is_checked=False,
    )
    findings: list[TensorDifference] = []
    for (tensor, (first, stop, expected)), actual in zip(pieces, digests):
        if expected != actual.read:
            what = f"rows {first}:{stop} do not match their recorded digest"
            findings.append(model.difference(tensor.name, what))
    for tensor in model.tensors.values():
        if not tensor.digests:
            findings.append(model.difference(tensor.name, "has no digest in the manifest"))
    return replace(_make_verification(model, findings), remedy=again_hint(source.manifest))


def _tie_findings(
    model: VerifiedModel, memory_nbytes: int, observer: Observer
) -> Iterator[TensorDifference]:
    """Yield tied heads with other values than the embedding, and other such duplicates."""
    tensors = {t.name: t for t in model.source.tensors}
    for check in model.match.checks:
        pair = [tensors[check.name], tensors[check.duplicate_of]]
        head, embedding = stream_digests(
            model.source,
            [row_stream(tensor, (0, tensor.shape[0])) for tensor in pair],
            memory_nbytes,
            progress=observer.progress(),
            task="verify tied",
            is_checked=False,
        )
        if head.read != embedding.read:
            original = model.labels[check.duplicate_of].tensor
            yield model.difference(check.name, f"is tied but not equal to {original}")


def _verify_pair(
    a: VerifiedModel,
    b: VerifiedModel,
    common: CommonOptions,
    options: VerifyOptions,
    observer: Observer,
) -> Verification:
    """Compare two checkpoints of one family. Their formats and layouts may differ. Padding is not compared."""
    if a.source.family.name != b.source.family.name:
        why = f"{a.source.family.name} and {b.source.family.name}"
        what = f"{a.source.display_name} and {b.source.display_name} are of different families"
        raise PrepError(what, why, "name two checkpoints of one family")
    tolerance = options["tolerance"]
    findings = list(_shape_findings(a, b, has_tolerance=tolerance is not None))
    if options["quick"]:
        result = _make_verification(a, findings, against=b)
        return result if findings else replace(result, values=None, checked=SHAPE_CHECKS)
    memory_nbytes = common.memory_nbytes
    # Tensors of different shapes or dtypes have no values to compare.
    mismatched = {(finding["leaf"], finding["tensor"]) for finding in findings}
    names: list[str] = []
    for name in a.tensors:
        label = a.labels[name]
        if name in b.tensors and (label.leaf, label.tensor) not in mismatched:
            names.append(name)
    if tolerance is not None:
        reads = [_ReadStreams(model.source, [], []) for model in (a, b)]
        distances = tuple(_tensor_distances(a, b, names, reads, observer.progress()))
        for name, distance in zip(names, distances):
            if not distance.max_abs <= tolerance:
                what = f"differs by up to {distance.max_abs:.3g}, the tolerance is {tolerance:g}"
                findings.append(a.difference(name, what))
        if not findings:
            for read in reads:
                read.check(memory_nbytes, observer.progress())
        return replace(_make_verification(a, findings, against=b), distances=distances)
    findings += _tie_findings(a, memory_nbytes, observer)
    findings += _tie_findings(b, memory_nbytes, observer)
    findings += _value_findings(a, b, names, memory_nbytes=memory_nbytes, observer=observer)
    num_different = sum("count" in finding for finding in findings)
    observer.note(f"same  {count_text(len(names) - num_different, 'tensor')}")
    for name in names:
        for model in (a, b):
            _note_padding(model, name, memory_nbytes, observer)
    return _make_verification(a, findings, against=b)


def _shape_findings(
    a: VerifiedModel, b: VerifiedModel, *, has_tolerance: bool
) -> Iterator[TensorDifference]:
    """Yield tensors missing in one checkpoint, and tensors of another dtype, shape or true vocabulary.

    With a tolerance the dtypes may differ.
    """
    for name in sorted({*a.tensors, *b.tensors}):
        a_tensor = a.tensors.get(name)
        b_tensor = b.tensors.get(name)
        if a_tensor is None:
            yield b.difference(name, f"is not in {a.source.display_name}")
        elif b_tensor is None:
            yield a.difference(name, f"is not in {b.source.display_name}")
        elif a_tensor.dtype != b_tensor.dtype and not has_tolerance:
            yield a.difference(name, f"is {a_tensor.dtype} and {b_tensor.dtype}")
        elif name in a.vocab_tensors and a.true_vocab != b.true_vocab:
            yield a.difference(name, f"has {a.true_vocab} and {b.true_vocab} true rows")
        elif a.unpadded_shape(a_tensor) != b.unpadded_shape(b_tensor):
            shapes = f"{list(a_tensor.shape)} and {list(b_tensor.shape)}"
            yield a.difference(name, f"has shapes {shapes}")


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
) -> Iterator[TensorDifference]:
    """Yield tensors with different values.

    Digests find them in one pass over each checkpoint, in the order of its files. Only different tensors are read a
    second time, side by side, for the first different value.
    """
    digests_by_name: list[dict[str, str]] = []
    reads: list[_ReadStreams] = []
    for model, other in ((a, b), (b, a)):
        compared = [tensor for tensor in model.source.all_tensors if tensor.name in {*names}]
        streams: list[Stream] = []
        for tensor in compared:
            scale = _missing_scale(model, other, tensor.name)
            rows = model.unpadded_rows(tensor)
            streams.append(written_stream(tensor, rows, tensor.dtype, scale))
        digests = stream_digests(
            model.source,
            streams,
            memory_nbytes,
            progress=observer.progress(),
            task=f"verify {model.source.display_name}",
            is_checked=False,
        )
        reads.append(_ReadStreams(model.source, streams, [each.read for each in digests]))
        digests_by_name.append({t.name: each.written for t, each in zip(compared, digests)})
    different = [name for name in names if digests_by_name[0][name] != digests_by_name[1][name]]
    for name in different:
        scale = _missing_scale(a, b, name) or _missing_scale(b, a, name)
        if scale is not None:
            # The values are not side by side: one model has the values of the layout.
            yield a.difference(name, f"has other values: the layout {scale.description}")
            continue
        stream = a.stream(name)
        first = compare_streams(
            a.source.byte_sources, stream, blobs_b=b.source.byte_sources, stream_b=b.stream(name)
        )
        place = f"{list(first.index)}: {first.value_a} -> {first.value_b}"
        what = f"{first.count:,} of {math.prod(stream.shape):,} values; first at {place}"
        finding = a.difference(name, what)
        finding["index"] = list(first.index)
        finding["a"] = first.value_a
        finding["b"] = first.value_b
        finding["count"] = first.count
        yield finding
    if not different:
        for read in reads:
            read.check(memory_nbytes, observer.progress())


def _missing_scale(model: VerifiedModel, other: VerifiedModel, name: str) -> LayoutScale | None:
    """Return the scale of a tensor if only the other checkpoint stores it scaled, else None."""
    scale = stored_scale(other.source, name)
    return None if scale == stored_scale(model.source, name) else scale


def _tensor_distances(
    a: VerifiedModel,
    b: VerifiedModel,
    names: Sequence[str],
    reads: Sequence[_ReadStreams],
    progress: Progress,
) -> Iterator[TensorDistance]:
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
                streams = (a.stream(name), b.stream(name))
                distance = measure_distance(
                    files_a, streams[0], reader_b=files_b, stream_b=streams[1]
                )
                for read, stream, digest in zip(reads, streams, distance.digests):
                    read.streams.append(stream)
                    read.digests.append(digest)
                progress.advance(a.tensors[name].nbytes)
                label = a.labels[name]
                yield TensorDistance(
                    label.leaf, label.tensor, distance.max_abs, distance.mean_abs, distance.cosine
                )
    finally:
        progress.end()


def _note_padding(model: VerifiedModel, name: str, memory_nbytes: int, observer: Observer) -> None:
    """Note the padding rows of a tensor of the vocabulary, and whether they are zeros."""
    tensor = model.tensors[name]
    if name not in model.vocab_tensors or tensor.shape[0] <= model.true_vocab:
        return
    rows = (model.true_vocab, tensor.shape[0])
    stream = row_stream(tensor, rows)
    (digest,) = stream_digests(
        model.source,
        [stream],
        memory_nbytes,
        progress=NullProgress(),
        task="padding",
        is_checked=False,
    )
    zeros = " (zeros)" if digest.read == tensor_digest_of_zeros(stream.nbytes) else ""
    padding = f"rows {rows[0]}:{rows[1]} of {model.source.display_name} are padding{zeros}"
    observer.note(f"same  {model.labels[name]} [0:{model.true_vocab}]; {padding}")


def _make_verification(
    model: VerifiedModel,
    findings: Sequence[TensorDifference],
    *,
    against: VerifiedModel | None = None,
) -> Verification:
    """Return the result of a comparison of values. Without `against` it covers padding."""
    padding_rows = 0
    for one in (model, against) if against is not None else ():
        for name in one.vocab_tensors & one.tensors.keys():
            padding_rows += one.tensors[name].shape[0] - one.true_vocab
    num_values = 0
    for tensor in model.tensors.values():
        shape = tensor.shape if padding_rows == 0 else model.unpadded_shape(tensor)
        num_values += math.prod(shape)
    is_equal = not findings
    return Verification(
        is_equal=is_equal,
        tensors=len(model.tensors) if is_equal else None,
        values=num_values if is_equal else None,
        differences=tuple(findings),
        seconds=0.0,
        ignored_padding_rows=padding_rows,
        checkpoint=model.source.display_name,
        against=against.source.display_name if against is not None else None,
        total_tensors=len(model.tensors),
    )
