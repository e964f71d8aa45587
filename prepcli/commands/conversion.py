"""What every converting command does alike: find the source, make the plan, show it or carry it out, report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.commands.conflicts import check_needs, check_stream
from prepcli.console.formatting import bytes_text
from prepcli.console.ui import LEAVES, Report, Ui
from prepcli.engine import casts
from prepcli.engine.budget import anonymous_nbytes
from prepcli.errors import PrepError, usage
from prepcli.execution.execute import Done, Options, convert, plan_digest
from prepcli.execution.run_folder import step_folder, steps_of
from prepcli.execution.uploads import Request as Upload
from prepcli.execution.uploads import to_url, url_of
from prepcli.execution.workers import ONE_PROCESS, PARENT, Asked, Workers, memory_of_each, with_workers
from prepcli.formats.manifest import MANIFEST, read_manifest
from prepcli.planning.plan import Plan
from prepcli.planning.shares import asked_share
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.remote.patience import patience_of
from prepcli.sources.locate import Located, default_checkpoint, locate
from prepcli.sources.opening import open_located
from prepcli.sources.source import Source
from prepcli.targets.streams import optimizer_nbytes


@dataclass(frozen=True, slots=True)
class Common:
    """The options that converting commands share."""

    checkpoint: str | None
    out: Path | None
    memory_nbytes: int
    dry_run: bool = False
    overwrite: bool = False
    restart: bool = False
    offline: bool = False
    revision: str | None = None
    step: int | None = None  # of a run; None: its last one
    asked: Asked = ONE_PROCESS
    stream: bool = False  # from the hub, without a copy here
    config: Path | None = None  # what the checkpoint is of, where it does not say so itself
    allow_overflow: bool = False  # of values that are cast


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what comes with it: the output's default name, lines for the user, what to do next, and what the plan
    reads where that is another view of the source."""

    plan: Plan
    out_name: str
    lines: tuple[str, ...]
    fields: dict[str, Any]
    next_command: Callable[[Path], str]
    source: Source | None = None


def find(common: Common, ui: Ui, accept: Callable[[Path], bool] = Path.is_dir) -> tuple[Located, Source]:
    """The source that was asked for, or the one prep checkpoint here."""
    name = common.checkpoint
    if name is None:
        name = f"./{default_checkpoint(Path(), accept)}"
        ui.note(f"using {name} (the only prep checkpoint here)")
    if common.step is not None:
        name = _with_step(name, common.step)
    located = locate(
        name,
        common.revision,
        common.offline,
        progress=ui.progress(),
        warn=ui.warn,
        stream=common.stream,
        afar=True,
        patience=patience_of(os.environ, ui.note),
    )
    return located, open_located(located, located.hub_id or name, common.config)


def check_config(common: Common, *sources: Source) -> None:
    """Usage PrepError for a config that is given where all sources say themselves of which model they are."""
    if common.config is not None and all(source.laid_out for source in sources):
        names = " and ".join(source.name for source in sources)
        raise usage(f"`--config` is not for {names}", f"{MANIFEST} says what model it is of", "leave it out")


def check_cast(common: Common, dtype: str | None) -> None:
    """Raise a usage PrepError for a permission that only a cast needs."""
    if dtype is None:
        check_needs("--allow-overflow", common.allow_overflow, "--dtype", "without a cast no value overflows")


def _with_step(name: str, step: int) -> str:
    """The name of a run's step; a usage PrepError where the run has none such."""
    steps = steps_of(Path(name).expanduser())
    if step in steps:
        return str(step_folder(Path(name), step))
    why = f"its steps are {', '.join(map(str, steps))}" if steps else "it is not the folder of a run"
    raise usage(f"{name} has no step {step}", why)


def run(
    common: Common, ui: Ui, make: Callable[[Source, Located], Planned], accept: Callable[[Path], bool] = Path.is_dir
) -> Report:
    """Plan, then show (`--dry-run`) or carry out; what has an address is made here first."""
    several = asked_share(common.asked.processes, os.environ)[0].count > 1  # before all else: a dry run checks it too
    url = url_of(common.out)
    if url is None:
        return _run(common, ui, make, accept)
    request = Upload(url, common.dry_run, common.overwrite, common.restart)
    if PARENT in os.environ:
        return _run(replace(common, out=request.here), ui, make, accept)
    return to_url(request, several, ui, lambda out, dry: _run(replace(common, out=out, dry_run=dry), ui, make, accept))


def _run(common: Common, ui: Ui, make: Callable[[Source, Located], Planned], accept: Callable[[Path], bool]) -> Report:
    located, source = find(common, ui, accept)
    check_config(common, source)
    check_stream(common.stream, located)
    planned = make(source, located)
    out = common.out or Path(planned.out_name)
    _check_apart(out, source)
    ui.note(source_line(source))
    if refusal := not_computed(source):
        ui.note(f"{source.name} can be converted, but not trained or sampled from: {refusal}")
    for line in planned.lines:
        ui.note(line)
    _verbose(planned.plan, ui)
    fields = {"source": _source_fields(source, located), **planned.fields, **_plan_fields(planned.plan, ui)}
    fields["not_computed"] = refusal
    if common.dry_run:
        return Report(_summary(planned.plan, out), {"output": str(out), "dry_run": True, **fields})
    done, processes = _carried_out(planned.plan, planned.source or source, out, common, ui)
    said = read_manifest(out) or {}
    counts = said.get("casts", [])
    for entry in counts:
        ui.note(casts.line(entry))
    ui.note(_closing(planned.plan, done, counts, ui, common))
    fields["accounting"]["changed_values"] = _changed(counts)
    if planned.plan.zstd_level:
        fields["compress"] = packed = _packed_fields(planned.plan, said)
        ui.note(_packed_line(packed))
    fields |= {"output": str(out), "casts": counts, **_done_fields(done, common), **processes}
    return Report(str(out), fields, planned.next_command(out))


def _carried_out(plan: Plan, source: Source, out: Path, common: Common, ui: Ui) -> tuple[Done, dict[str, Any]]:
    """The output, with what this process and its workers did, and fields that tell of them."""
    asked, own_nbytes = common.asked, anonymous_nbytes()
    share, launcher = asked_share(asked.processes, os.environ)
    if launcher:
        ui.note(f"process {share.index} of {share.count}, as {launcher} says")
    mine, *others = share.among(asked.workers)
    memory_nbytes = memory_of_each(common.memory_nbytes, asked.workers, own_nbytes)
    with Workers(asked.words, others, memory_nbytes, ui.progress()) as workers:
        options = Options(
            out, memory_nbytes, common.overwrite, common.restart, mine, asked.workers, workers.start, workers.check
        )
        options = replace(options, allow_overflow=common.allow_overflow)
        done = convert(plan, source, options, workers.progress, ui.note)
        done = with_workers(done, workers.results(), own_nbytes)
    fields = {"count": mine.count, "index": mine.index, "workers": asked.workers}
    return done, {"processes": fields} if mine.count > 1 else {}


def _check_apart(out: Path, source: Source) -> None:
    """Usage PrepError where writing the output would change the source, or replacing what is there would remove it."""
    target = out.resolve()
    partial = target.with_name(target.name + ".partial")
    beside = () if source.root.is_file() else (*source.files, *source.small_files)
    held = (path.resolve().parent for path in beside)  # links may lead elsewhere
    weights = {source.root.resolve(), *(path.resolve().parent for path in source.files)}
    for root in dict.fromkeys((source.root.resolve(), *held)):
        if root in (target, partial):
            raise usage(f"the output {out} is the source", "sources are never written to", "`--out NAME`")
        if root in target.parents and root in weights:  # settings alone may lie where one works
            hint = f"`--out ../{out.name}`"
            raise usage(f"the output {out} is inside the source", "sources are never written to", hint)
        if target in root.parents:
            raise usage(f"the source is inside the output {out}", "it would be replaced with it", "`--out NAME`")
    for folder in (Path.cwd(), Path(os.path.expanduser("~")).resolve()):
        if target == folder or target in folder.parents:
            what = f"the output {out} would be in place of where you are, or live"
            raise usage(what, f"{folder} is there, and outputs replace whole folders", "`--out NAME`")


def source_line(source: Source) -> str:
    """`EleutherAI/gpt-neo-1.3B  gpt_neo  316 tensors  4.90 GiB float32`."""
    dtypes = _weight_dtypes(source)
    size = bytes_text(sum(t.nbytes for t in source.tensors))
    parts = [source.name, source.family.name, f"{len(source.tensors)} tensors", f"{size} {', '.join(dtypes)}"]
    if nbytes := optimizer_nbytes(source):
        parts.append(f"optimizer state {bytes_text(nbytes)}")
    if len(source.files) > 1:
        parts.append(f"{len(source.files)} files")
    return "  ".join(parts)


def not_computed(source: Source) -> str | None:
    """Return why prep cannot compute a model of this config, None if it can."""
    try:
        source.family.traits(source.config)
    except PrepError as error:
        return str(error)
    return None


def _weight_dtypes(source: Source) -> list[str]:
    """Those of tensors that are not small beside the largest."""
    large = max((t.nbytes for t in source.tensors), default=0)
    return sorted({t.dtype for t in source.tensors if t.nbytes * 8 >= large})


def output_config(source: Source, vocabulary: Vocabulary, tied: bool, dtype: str | None = None) -> dict[str, Any]:
    """The source's config for an output with this vocabulary, in `dtype` where that was asked for; a head that became
    its own is said to be so."""
    config = with_vocabulary(source.config, vocabulary)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]  # transformers' 5 and 4
    config |= dict.fromkeys(named, dtype) if dtype else {}
    if tied or not source.family.tied(config, (source.family.tie.tensor,)):
        return config
    return config | {"tie_word_embeddings": False, **source.family.tie.untied(config)}


def request_text(command: str, source: Source, options: Sequence[tuple[str, object]]) -> str:
    """The command line that asks for this, options at their defaults (None, False, empty) left out."""
    words = [f"prep {command} {source.name}"]
    for flag, value in options:
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [f"{flag} {each}" for each in value]
        elif value is not None and value is not False:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _verbose(plan: Plan, ui: Ui) -> None:
    for leaf in plan.leaves:
        ui.note(f"  {leaf.name}  {list(leaf.grid.shape)} {leaf.dtype} in chunks of {list(leaf.grid.chunk)}", LEAVES)
    for dropped in plan.dropped:
        ui.note(f"  dropped {plan.names.get(dropped.name, dropped.name)}: {dropped.rule}", LEAVES)


def _source_fields(source: Source, located: Located) -> dict[str, Any]:
    return {
        "name": source.name,
        "revision": located.revision,
        "files": len(source.files),
        "bytes": sum(fact.size for fact in source.facts),
    }


def _plan_fields(plan: Plan, ui: Ui) -> dict[str, Any]:
    names = plan.names
    used = {s.name for s in plan.streams if s.right and s.left}
    fields: dict[str, Any] = {
        "plan_digest": plan_digest(plan),
        "accounting": {
            "tensors": len(used | {d.name for d in plan.dropped}),
            "used": len(used),
            "dropped": [
                {"name": names.get(d.name, d.name), "rows": d.rows, "bytes": d.nbytes, "rule": d.rule}
                for d in plan.dropped
            ],
            "filled": [
                {"name": names.get(s.name, s.name), "rows": list(s.rows), "with": s.fill.kind}
                for s in plan.streams
                if s.fill
            ],
            "changed_values": None if any(stream.cast for stream in plan.streams) else 0,
        },
        "chunks": plan.chunks,
        "casts": casts.report(plan.streams),
    }
    if ui.level >= LEAVES:
        fields["leaves"] = [
            {"name": x.name, "shape": x.grid.shape, "dtype": x.dtype, "chunk": x.grid.chunk} for x in plan.leaves
        ]
    return fields


def _done_fields(done: Done, common: Common) -> dict[str, Any]:
    outcome = done.outcome
    seconds = outcome.seconds
    return {
        "already": done.already,
        "bytes": {
            "read": outcome.read_nbytes,
            "written": outcome.written_nbytes,
            "moved": outcome.read_nbytes + outcome.copied_nbytes + outcome.written_nbytes,
            "resumed": outcome.resumed_nbytes,
        },
        "memory": {"budget": common.memory_nbytes, "peak": done.peak_nbytes},
        "time": {k: round(v, 3) for k, v in (("read", seconds.read), ("move", seconds.move), ("write", seconds.write))},
    }


def _changed(counts: Sequence[Mapping[str, Any]]) -> int:
    return sum(entry["changed"] for entry in counts)


def _packed_fields(plan: Plan, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of an output's chunks, raw and as they are stored."""
    raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.counts) for leaf in plan.leaves)
    stored = sum(manifest["packed"].values())
    return {"with": manifest["compress"], "raw": raw, "stored": stored, "ratio": round(stored / max(1, raw), 4)}


def _packed_line(packed: Mapping[str, Any]) -> str:
    sizes = f"{bytes_text(packed['raw'])} compressed to {bytes_text(packed['stored'])}"
    return f"{sizes}, {packed['ratio']:.2f} x, with {packed['with']}"


def _summary(plan: Plan, out: Path) -> str:
    dropped = f", {_dropped_text(plan)}" if _dropped_text(plan) else ""
    chunks = f" in {plan.chunks:,} chunks of {len(plan.leaves)} leaves" if plan.leaves else ""
    return (
        f"would write {bytes_text(plan.write_nbytes)}{chunks} to {out}:"
        f" {len({s.name for s in plan.streams if s.right})} tensors{dropped}; plan {plan_digest(plan)}"
    )


def _dropped_text(plan: Plan) -> str:
    by_rule: dict[str, int] = {}
    for dropped in plan.dropped:
        if dropped.rows:
            continue
        by_rule[dropped.rule] = by_rule.get(dropped.rule, 0) + 1
    return ", ".join(f"{count} dropped ({rule})" for rule, count in by_rule.items())


def _closing(plan: Plan, done: Done, counts: Sequence[Mapping[str, Any]], ui: Ui, common: Common) -> str:
    if done.already:
        return f"already done: {done.out} was made by the same request from the same source"
    used = len({s.name for s in plan.streams if s.right})
    memory = f"peak {done.peak_nbytes >> 20} MiB of {common.memory_nbytes >> 20}"
    parts = [f"{used} tensors", *filter(None, [_dropped_text(plan)]), f"{_changed(counts):,} values changed"]
    return f"done in {ui.clock() - ui.started_s:.1f} s, {memory}; {', '.join(parts)}"
