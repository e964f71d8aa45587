"""`prep verify`: every tensor against what the manifest records, or against another checkpoint, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from prepcli.commands.conflicts import check_stream
from prepcli.commands.conversion import CommonOptions, check_config_option, open_checkpoint, source_line
from prepcli.console.formatting import format_bytes
from prepcli.console.lists import MAX_NAMES
from prepcli.console.progress import NullProgress, Progress
from prepcli.console.ui import LEAVES, Report, Ui
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import make_budget
from prepcli.engine.compare import Difference, compare_streams
from prepcli.engine.digest import digest_of_zeros
from prepcli.errors import PrepError, usage_error
from prepcli.formats.checksums import read_checksum_bytes
from prepcli.planning.accounting import DEFAULT_MATCH_OPTIONS, Accounting
from prepcli.planning.boxes import Range
from prepcli.planning.plan import Stream
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_rows
from prepcli.targets.streams import vocab_tensor_names

HEADER_CHECKS = ("headers", "file sizes")  # what `--quick` checks of one checkpoint
SHAPE_CHECKS = ("names", "shapes", "dtypes")  # what it compares of two


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One checkpoint, or two that should hold the same; `quick`: no values are read."""

    common: CommonOptions
    against: str | None = None
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A tensor, or rows of it, that is not what it should be."""

    name: str
    text: str
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class _VerifiedModel:
    """A source with what its rows say of it: the tensors that count and how they are called, and those that have the
    vocabulary."""

    source: Source
    accounting: Accounting
    tensors: dict[str, SourceTensor]
    names: dict[str, str]
    vocab_tensors: frozenset[str]
    true_vocab: int


def verify(request: VerifyRequest, ui: Ui) -> Report:
    """Read all of it. The report carries an error if anything differs."""
    located, source = open_checkpoint(request.common, ui)
    ui.note(source_line(source))
    spend = request.common.memory_nbytes
    if request.against is None:
        check_config_option(request.common, source)
        check_stream(request.common.stream, located)
        return _verify_digests(_collect_model(source), request, spend, ui)
    against, other = open_checkpoint(_against_options(request), ui)
    check_config_option(request.common, source, other)
    check_stream(request.common.stream, located, against)
    ui.note(source_line(other))
    if not (source.state_tensors and other.state_tensors):
        for line in _ignored_state_lines((source, other)):
            ui.note(line)
        source, other = replace(source, state_tensors=()), replace(other, state_tensors=())
    return _verify_pair(_collect_model(source), _collect_model(other), request, spend, ui)


def _ignored_state_lines(sources: Iterable[Source]) -> Iterator[str]:
    """What only one side has: the state of a training run."""
    for source in sources:
        if source.state_tensors:
            nbytes = sum(tensor.nbytes for tensor in source.state_tensors)
            yield f"training state of {source.display_name} ({format_bytes(nbytes)}) left out: only parameters are compared"


def _against_options(request: VerifyRequest) -> CommonOptions:
    common = request.common
    return CommonOptions(
        request.against, None, common.memory_nbytes, offline=common.offline, stream=common.stream, config=common.config
    )


def _collect_model(source: Source) -> _VerifiedModel:
    found = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    used = [t for t in source.tensors if t.name in found.uses]
    tensors = {t.name: t for t in (*used, *source.state_tensors)}
    vocab = frozenset(vocab_tensor_names(source, found))
    return _VerifiedModel(source, found, tensors, source.display_names(), vocab, source.vocabulary().true_size)


def _verify_digests(model: _VerifiedModel, request: VerifyRequest, memory_nbytes: int, ui: Ui) -> Report:
    """Against the digests that the manifest records."""
    source = model.source
    tensors = [t for t in source.all_tensors if t.digests]
    read_checksum_bytes(source.root, source.tree_manifest)
    if request.quick:
        return _quick_ok_report(model, HEADER_CHECKS, "no values read, no digests checked", ui)
    if not tensors:
        why = "it has no prep-manifest.json with digests"
        raise usage_error(
            f"there is nothing to verify {source.display_name} against",
            why,
            f"`prep verify {source.display_name} OTHER`",
        )
    pieces = [(t, (low, high), text) for t in tensors for low, high, text in t.digests]
    found = _compute_digests(source, [(t, rows) for t, rows, _ in pieces], memory_nbytes, ui.progress(), "verify")
    findings = [
        Finding(model.names[t.name], f"rows {rows[0]}:{rows[1]} have another digest than the manifest records")
        for (t, rows, wanted), seen in zip(pieces, found)
        if wanted != seen
    ]
    findings += [
        Finding(model.names[t.name], "has no digest in the manifest") for t in model.tensors.values() if not t.digests
    ]
    return _findings_report(model, findings, f"{source.display_name} is damaged", ui)


def _tie_findings(model: _VerifiedModel, memory_nbytes: int, ui: Ui) -> Iterator[Finding]:
    """A head that is stored although it is tied, and is not its embedding."""
    tensors = {t.name: t for t in model.source.tensors}
    for check in model.accounting.checks:
        pair = [tensors[check.name], tensors[check.duplicate_of]]
        pieces = [(tensor, (0, tensor.shape[0])) for tensor in pair]
        head, embedding = _compute_digests(model.source, pieces, memory_nbytes, ui.progress(), "verify tied")
        if head != embedding:
            yield Finding(model.names[check.name], f"is tied and not equal to {model.names[check.duplicate_of]}")


def _verify_pair(a: _VerifiedModel, b: _VerifiedModel, request: VerifyRequest, memory_nbytes: int, ui: Ui) -> Report:
    """Against another checkpoint, whatever its format and layout."""
    if a.source.family.name != b.source.family.name:
        why = f"{a.source.family.name} and {b.source.family.name}"
        raise PrepError(f"{a.source.display_name} and {b.source.display_name} are of different families", why)
    findings = list(_shape_findings(a, b))
    if request.quick and not findings:
        return _quick_ok_report(a, SHAPE_CHECKS, "equal, no values read", ui)
    bad = {finding.name for finding in findings}
    names = [n for n in a.tensors if n in b.tensors and a.names[n] not in bad]
    if not request.quick:
        findings += [*_tie_findings(a, memory_nbytes, ui), *_tie_findings(b, memory_nbytes, ui)]
        findings += _value_findings(a, b, names, memory_nbytes, ui)
        ui.note(f"same  {len(names) - len({f.name for f in findings if f.difference})} tensors")
        for line in _padding_lines(a, b, names, memory_nbytes):
            ui.note(line)
    return _findings_report(a, findings, f"{a.source.display_name} is not the same as {b.source.display_name}", ui)


def _shape_findings(a: _VerifiedModel, b: _VerifiedModel) -> Iterator[Finding]:
    """Tensors that one side lacks, or that differ in dtype, shape or true vocabulary."""
    for name in sorted({*a.tensors, *b.tensors}):
        full = a.names[name] if name in a.names else b.names[name]
        x, y = a.tensors.get(name), b.tensors.get(name)
        if x is None or y is None:
            lacking = a.source.display_name if x is None else b.source.display_name
            yield Finding(full, f"is not in {lacking}")
        elif x.dtype != y.dtype:
            yield Finding(full, f"is {x.dtype} and {y.dtype}")
        elif name in a.vocab_tensors and a.true_vocab != b.true_vocab:
            yield Finding(full, f"has {a.true_vocab} and {b.true_vocab} true rows")
        elif x.shape[name in a.vocab_tensors :] != y.shape[name in a.vocab_tensors :]:
            yield Finding(full, f"has the shapes {list(x.shape)} and {list(y.shape)}")


def _true_rows(model: _VerifiedModel, tensor: SourceTensor) -> Range:
    rows = tensor.shape[0] if tensor.shape else 1
    return (0, model.true_vocab) if tensor.name in model.vocab_tensors else (0, rows)


def _value_findings(a: _VerifiedModel, b: _VerifiedModel, names: Sequence[str], memory_nbytes: int, ui: Ui) -> Iterator[Finding]:
    sides = []
    for model in (a, b):
        wanted = [(t, _true_rows(model, t)) for t in model.source.all_tensors if t.name in names]
        found = _compute_digests(model.source, wanted, memory_nbytes, ui.progress(), f"verify {model.source.display_name}")
        sides.append({t.name: text for (t, _), text in zip(wanted, found)})
    for name in names:
        if sides[0][name] != sides[1][name]:
            yield _value_finding(a, b, name)


def _value_finding(a: _VerifiedModel, b: _VerifiedModel, name: str) -> Finding:
    streams = [_row_stream(model.tensors[name], _true_rows(model, model.tensors[name])) for model in (a, b)]
    found = compare_streams(a.source.byte_sources, streams[0], b.source.byte_sources, streams[1])
    values = math.prod(streams[0].shape)
    text = f"{found.count:,} of {values:,} values; first at {list(found.index)}: {found.value_a} -> {found.value_b}"
    return Finding(a.names[name], text, found)


def _padding_lines(a: _VerifiedModel, b: _VerifiedModel, names: Sequence[str], memory_nbytes: int) -> Iterator[str]:
    """What lies beyond the true vocabulary on either side."""
    for name in names:
        for model in (a, b):
            tensor = model.tensors[name]
            if name in model.vocab_tensors and tensor.shape[0] > model.true_vocab:
                zeros = _padding_is_zeros(model, tensor, memory_nbytes)
                full = model.names[name]
                rows = f"rows {model.true_vocab}:{tensor.shape[0]} of {model.source.display_name} are padding"
                yield f"same  {full} [0:{model.true_vocab}]; {rows}{' (zeros)' if zeros else ''}"


def _padding_is_zeros(model: _VerifiedModel, tensor: SourceTensor, memory_nbytes: int) -> bool:
    rows = (model.true_vocab, tensor.shape[0])
    (found,) = _compute_digests(model.source, [(tensor, rows)], memory_nbytes, NullProgress(), "padding")
    return found == digest_of_zeros(_row_stream(tensor, rows).nbytes)


def _row_stream(tensor: SourceTensor, rows: Range) -> Stream:
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())


def _compute_digests(
    source: Source, pieces: Sequence[tuple[SourceTensor, Range]], memory_nbytes: int, progress: Progress, task: str
) -> list[str]:
    streams = [_row_stream(tensor, rows) for tensor, rows in pieces]
    progress.begin(task, sum(stream.nbytes for stream in streams))
    try:
        spend = make_budget(memory_nbytes)
        with open_blobs(source.byte_sources, spend.cache_nbytes) as files:
            outcome = pipeline.run(streams, files, None, spend, progress)
    finally:
        progress.end()
    return [outcome.digests[i] for i in range(len(streams))]


def _findings_report(model: _VerifiedModel, findings: Sequence[Finding], what: str, ui: Ui) -> Report:
    if not findings:
        return _ok_report(model, ui)
    shown = len(findings) if ui.level >= LEAVES else MAX_NAMES
    for finding in findings[:shown]:
        ui.note(f"differs  {finding.name}  {finding.text}")
    if len(findings) > shown:
        ui.note(f"and {len(findings) - shown:,} more; `-v` or `--json` lists all")
    names = {finding.name for finding in findings}
    error = PrepError(
        f"{what} ({len(names)} of {len(model.tensors)} tensors)", findings[0].name + " " + findings[0].text
    )
    return Report(fields={"differences": [_finding_fields(finding) for finding in findings]}, error=error)


def _finding_fields(finding: Finding) -> dict[str, object]:
    found = finding.difference
    place = {"index": list(found.index), "a": found.value_a, "b": found.value_b, "count": found.count} if found else {}
    return {"leaf": finding.name, "what": finding.text, **place}


def _ok_report(model: _VerifiedModel, ui: Ui) -> Report:
    values = sum(math.prod(t.shape) for t in model.tensors.values())
    text = f"ok: {len(model.tensors)} tensors, {values:,} values, 0 different ({_elapsed_text(ui)})"
    return Report(text, {"tensors": len(model.tensors), "values": values, "differences": []})


def _quick_ok_report(model: _VerifiedModel, checked: Sequence[str], result: str, ui: Ui) -> Report:
    """The report of a check of headers, which says nothing of values."""
    count, (*others, last) = len(model.tensors), checked
    text = f"ok: {', '.join(others)} and {last} of {count} tensors {result} ({_elapsed_text(ui)})"
    return Report(text, {"tensors": count, "values": None, "checked": list(checked)})


def _elapsed_text(ui: Ui) -> str:
    return f"{ui.clock() - ui.started_s:.1f} s"
