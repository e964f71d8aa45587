"""`prep export`: back to a Hugging Face folder, loadable by transformers with no flag."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.accounting import KEEP_ALL, vocab_tensors
from prepcli.commands.conversion import Common, Planned, output_config, request_text, run
from prepcli.errors import usage
from prepcli.folders import entries, laid_out, settings
from prepcli.formats.safetensors_layout import shard
from prepcli.locate import Located
from prepcli.plan import Fill, Plan
from prepcli.sources import Source, counted, table_of
from prepcli.streams import Cut, Target, left_out, optimizer_nbytes, rows_of, streams, taken_off
from prepcli.ui import Report, Ui
from prepcli.units import bytes_text
from prepcli.vocabulary import Vocabulary

PAGE_START = 0  # payloads begin at a page: chunks do so too, and pages then move as they are


@dataclass(frozen=True, slots=True)
class Request:
    """Padding is taken off unless it is kept; files hold at most `shard_nbytes`."""

    common: Common
    keep_padding: bool = False
    shard_nbytes: int = 5 * 10**9
    true_vocab: int | None = None


def export(request: Request, ui: Ui) -> Report:
    """An Orbax checkpoint into a Hugging Face folder."""
    return run(request.common, ui, lambda source, located: plan(request, source, located))


def plan(request: Request, source: Source, located: Located) -> Planned:
    """Every tensor of the rows into files as they are shared on the hub. PrepError where that does not add up."""
    if source.file_names and not source.manifest:
        why = "there is nothing to export: transformers reads it as it is"
        raise usage(f"{source.name} is a Hugging Face folder", why, f"`prep save-init {source.name}`")
    vocabulary = source.vocabulary(request.true_vocab)
    rows = vocabulary.stored if request.keep_padding else vocabulary.true
    scan = (source.manifest or {}).get("scan", True), (source.manifest or {}).get("scan_axis", 0)
    found = counted(source, table_of(source, *scan), KEEP_ALL)
    cut = Cut(vocabulary, vocab_tensors(found), Fill("zeros"))
    kept = [t for t in source.tensors if t.name in found.uses]
    sizes = rows_of(kept, cut.tensors, rows)
    groups = shard(entries(source, kept, sizes), request.shard_nbytes)
    files, places, layouts = laid_out([(name, group, PAGE_START) for name, group in groups])
    targets = {t.name: Target((places[source.names.full(t.name)],), sizes[t.name]) for t in kept}
    config = output_config(source, Vocabulary(vocabulary.true, rows), found.tied)
    base = located.name.removesuffix("-padded") if rows == vocabulary.true else located.name
    made = Plan(
        command="export",
        request=_request_text(request, source),
        source_name=source.name,
        sources=source.facts,
        streams=streams(source, targets, cut, {c.name for c in found.checks}),
        files=files,
        small_files=settings(config, layouts, source.small_files),
        dropped=(*found.dropped, *taken_off(source, targets, cut), *left_out(source)),
        checks=found.checks,
        settings={
            "name": base,
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true, "padded": rows},
            "prefixed": source.names.prefixed,
            "tied": found.tied,
            "config": config,
        },
        names={t.name: source.names.full(t.name) for t in source.tensors},
    )
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    off = f"; {vocabulary.stored - rows} rows of padding taken off" if rows < vocabulary.stored else ""
    state = optimizer_nbytes(source)
    off += f"; optimizer state ({bytes_text(state)}) left out" if state else ""
    step = (source.manifest or {}).get("step")
    called = located.name if step is None else f"{located.name} step {step}"
    lines = (f"{called} -> Hugging Face safetensors, {count}{off}",)
    fields = {"vocab": {"true": vocabulary.true, "written": rows}, "files": len(files)}
    return Planned(made, f"{base}-hf", lines, fields, lambda out: f"prep verify {out} {source.name}")


def _request_text(request: Request, source: Source) -> str:
    options = [
        ("--keep-padding", request.keep_padding),
        ("--shard-size", request.shard_nbytes if request.shard_nbytes != 5 * 10**9 else None),
        ("--true-vocab", request.true_vocab),
    ]
    return request_text("export", source, options)
