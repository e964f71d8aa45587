"""`prep pad-vocab`: rows added to the vocabulary, so that it can be sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prepcli.commands.conflicts import check_needs, check_one_of
from prepcli.commands.conversion import Common, Planned, output_config, request_text, run
from prepcli.console.formatting import bytes_text
from prepcli.console.ui import Report, Ui
from prepcli.errors import PrepError, usage
from prepcli.planning.accounting import KEEP_ALL, Wishes, vocab_tensors
from prepcli.planning.plan import Fill, Flat, Plan
from prepcli.planning.slabs import PAGE
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.locate import Located
from prepcli.sources.source import Source, SourceTensor, counted, table_of
from prepcli.targets.hf_folder import Group, copied, entries, laid_out, settings
from prepcli.targets.streams import Cut, Target, rows_of, streams, taken_off
from trainer.models.mesh import DEFAULT_RULES, parse, rule_text

KINDS = ("zeros", "mean", "normal")
SEEDS = 1 << 64
MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Request:
    """To a multiple, to a size, or to what a mesh divides; `init` is what the new rows hold."""

    common: Common
    multiple: int | None = None  # 8, where neither a size nor a mesh is given
    size: int | None = None
    mesh: str | None = None
    init: str = "zeros"
    seed: int | None = None
    true_vocab: int | None = None
    wishes: Wishes = KEEP_ALL


def pad_vocab(request: Request, ui: Ui) -> Report:
    """Pad the vocabulary of a Hugging Face folder into a new one."""
    check_one_of({"--multiple": request.multiple, "--size": request.size, "--mesh": request.mesh})
    check_seed(request.init, request.seed)
    return run(request.common, ui, lambda source, located: plan(request, source, located))


def padded_size(request: Request, vocabulary: Vocabulary) -> int:
    """The rows that are asked for; usage PrepError where that is fewer than there are true ones."""
    if request.size is not None:
        if request.size < vocabulary.true:
            why = f"the true vocabulary has {vocabulary.true} rows"
            raise usage(f"`--size {request.size}` would cut the vocabulary", why, "a size at least as large")
        return request.size
    if request.mesh is not None:
        mesh = parse(request.mesh)
        return vocabulary.padded_to(math.lcm(*(mesh.size(axis) for axis in DEFAULT_RULES["vocab"][0])))
    return vocabulary.padded_to(request.multiple or MULTIPLE)


def check_seed(init: str, seed: int | None) -> None:
    """Raise a usage PrepError for a seed that nothing is drawn with."""
    if init != "normal":
        check_needs("--seed", seed, "--init normal", "zeros and mean draw nothing")


def fill_of(init: str, seed: int | None, source: Source) -> Fill:
    """What new rows are made of; PrepError, mostly of usage, for what cannot be made."""
    if init not in KINDS:
        raise usage(f"`--init {init}` is not known", f"it takes {', '.join(KINDS)}")
    if init != "normal":
        return Fill(init)
    seed = seed or 0
    if seed >= SEEDS:
        raise usage(f"`--seed {seed}` is too large", f"it has to be below {SEEDS:,}")
    std = source.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise PrepError("config.json makes no sense", f"initializer_range is {std!r}, it has to be a number from 0 on")
    return Fill(init, seed, float(std))


def plan(request: Request, source: Source, located: Located) -> Planned:
    """Every tensor as it is, in the same files, those of the vocabulary with more rows."""
    if not source.file_names:
        hint = "`prep save-init --pad-vocab N` pads on the way; `prep export` makes a Hugging Face folder"
        raise usage(f"{source.name} is an Orbax checkpoint", "pad-vocab pads Hugging Face folders", hint)
    vocabulary = source.vocabulary(request.true_vocab)
    size = padded_size(request, vocabulary)
    found = counted(source, table_of(source), request.wishes)
    wanted = {d.name for d in found.dropped if d.rule == "--drop"}
    cut = Cut(vocabulary, vocab_tensors(found), fill_of(request.init, request.seed, source))
    rows = rows_of(source.tensors, cut.tensors, size)
    kept = [(file, t) for file, t in zip(source.file_names, source.tensors) if t.name not in wanted]
    files, places, layouts = laid_out(_groups(source, kept, rows))
    targets = {t.name: Target((places[source.names.full(t.name)],), rows[t.name]) for _, t in kept}
    config = output_config(source, Vocabulary(vocabulary.true, size), found.tied)
    made = Plan(
        command="pad-vocab",
        request=_request_text(request, source),
        source_name=source.name,
        sources=source.facts,
        streams=streams(source, targets, cut),
        files=files,
        small_files=settings(config, layouts, copied(source.small_files, source.root)),
        dropped=(*(d for d in found.dropped if d.name in wanted), *taken_off(source, targets, cut)),
        checks=found.checks,
        settings={
            "name": f"{_base(located)}-padded",
            "kind": "hf",
            "family": source.family.name,
            "vocab": {"true": vocabulary.true, "padded": size, "init": request.init},
            "prefixed": source.names.prefixed,
            "tied": found.tied,
            "config": config,
        },
        names={t.name: source.names.full(t.name) for t in source.tensors},
    )
    fields = {"vocab": {"true": vocabulary.true, "padded": size, "multiple": _multiple(request), "init": request.init}}
    lines = (_vocabulary_line(source, cut, vocabulary, size, request.init, found.tied),)
    options = _next_options(request, source)
    return Planned(made, f"{_base(located)}-padded", lines, fields, lambda out: f"prep save-init {out}{options}")


def _next_options(request: Request, source: Source) -> str:
    """The options with which `save-init` lays the padded model out for the mesh that it was padded for."""
    if request.mesh is None:
        return ""
    mesh, sizes = parse(request.mesh), source.family.sizes(source.config)
    whole = [
        rule_text(dim, (axes, ()))
        for dim, (axes, *others) in DEFAULT_RULES.items()
        if dim != "vocab" and not others and sizes.get(dim, 0) % math.prod(map(mesh.size, axes))
    ]
    return "".join([f" --mesh {request.mesh}", *(f" --rule '{rule}'" for rule in whole)])


def _multiple(request: Request) -> int | None:
    """The multiple that decides; None where a size or a mesh does."""
    return (request.multiple or MULTIPLE) if request.size is None and request.mesh is None else None


def _base(located: Located) -> str:
    return located.name.removesuffix("-padded")


def _groups(source: Source, kept: list[tuple[str, SourceTensor]], rows: dict[str, int]) -> list[Group]:
    """The source's files, each tensor in its place, as deep in a page as it was."""
    groups: list[Group] = []
    for file in dict.fromkeys(name for name, _ in kept):
        inside = [t for name, t in kept if name == file]
        first = inside[0].side[0]
        lead = first.offset % PAGE if isinstance(first, Flat) else None
        groups.append((file, entries(source, inside, rows), lead))
    return groups


def _request_text(request: Request, source: Source) -> str:
    options = [
        ("--multiple", _multiple(request)),
        ("--size", request.size),
        ("--mesh", request.mesh),
        ("--init", request.init if request.init != "zeros" else None),
        ("--seed", request.seed or None),
        ("--true-vocab", request.true_vocab),
        ("--drop", request.wishes.drop),
        ("--config", request.common.config),
        ("--untie", request.wishes.untie),
    ]
    return request_text("pad-vocab", source, options)


def _vocabulary_line(source: Source, cut: Cut, vocabulary: Vocabulary, size: int, init: str, tied: bool) -> str:
    tensor = next(t for t in source.tensors if t.name in cut.tensors)
    added = size - vocabulary.stored
    row = tensor.nbytes // tensor.shape[0]
    tie = "   embedding and head are tied: padded once" if tied else ""
    if added <= 0:
        return f"vocabulary {vocabulary.stored} -> {size}: nothing to add{tie}"
    return f"vocabulary {vocabulary.stored} -> {size} (+{added} rows of {init}, {bytes_text(added * row)}){tie}"
