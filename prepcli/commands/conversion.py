"""What every converting command does alike: find the source, make the plan, show it or carry it out, report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.commands.conflicts import check_needs, check_stream
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import LEAVES, Report, Ui
from prepcli.engine import casts
from prepcli.engine.budget import anonymous_nbytes
from prepcli.errors import PrepError, usage_error
from prepcli.execution.execute import ConversionResult, ExecuteOptions, execute_plan, plan_digest
from prepcli.execution.run_folder import saved_steps, step_folder
from prepcli.execution.uploads import UploadRequest as Upload
from prepcli.execution.uploads import make_and_upload, parse_out_url
from prepcli.execution.workers import (
    ONE_PROCESS,
    PARENT_VARIABLE,
    ProcessOptions,
    WorkerPool,
    add_worker_reports,
    worker_memory_nbytes,
)
from prepcli.formats.manifest import MANIFEST_FILE, read_manifest
from prepcli.planning.plan import Plan
from prepcli.planning.shares import requested_share
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.locate import LocatedCheckpoint, default_checkpoint, locate
from prepcli.sources.opening import open_located
from prepcli.sources.source import Source
from prepcli.targets.streams import optimizer_nbytes


@dataclass(frozen=True, slots=True)
class CommonOptions:
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
    process_options: ProcessOptions = ONE_PROCESS
    stream: bool = False  # from the hub, without a copy here
    config: Path | None = None  # what the checkpoint is of, where it does not say so itself
    allow_overflow: bool = False  # of values that are cast


@dataclass(frozen=True, slots=True)
class PlannedConversion:
    """A plan and what comes with it: the output's default name, lines for the user, what to do next, and what the plan
    reads where that is another view of the source."""

    plan: Plan
    default_out_name: str
    notes: tuple[str, ...]
    fields: dict[str, Any]
    next_command: Callable[[Path], str]
    source_view: Source | None = None


def open_checkpoint(
    common: CommonOptions, ui: Ui, accept: Callable[[Path], bool] = Path.is_dir
) -> tuple[LocatedCheckpoint, Source]:
    """The source that was asked for, or the one prep checkpoint here."""
    name = common.checkpoint
    if name is None:
        name = f"./{default_checkpoint(Path(), accept)}"
        ui.note(f"using {name} (the only prep checkpoint here)")
    if common.step is not None:
        name = _step_checkpoint(name, common.step)
    located = locate(
        name,
        common.revision,
        common.offline,
        progress=ui.progress(),
        warn=ui.warn,
        stream=common.stream,
        allow_remote=True,
        retry_policy=retry_policy_from_env(os.environ, ui.note),
    )
    return located, open_located(located, located.hub_id or name, common.config)


def check_config_option(common: CommonOptions, *sources: Source) -> None:
    """Usage PrepError for a config that is given where all sources say themselves of which model they are."""
    if common.config is not None and all(source.tree_manifest for source in sources):
        names = " and ".join(source.display_name for source in sources)
        raise usage_error(f"`--config` is not for {names}", f"{MANIFEST_FILE} says what model it is of", "leave it out")


def check_allow_overflow(common: CommonOptions, dtype: str | None) -> None:
    """Raise a usage PrepError for a permission that only a cast needs."""
    if dtype is None:
        check_needs("--allow-overflow", common.allow_overflow, "--dtype", "without a cast no value overflows")


def _step_checkpoint(name: str, step: int) -> str:
    """The name of a run's step; a usage PrepError where the run has none such."""
    steps = saved_steps(Path(name).expanduser())
    if step in steps:
        return str(step_folder(Path(name), step))
    why = f"its steps are {', '.join(map(str, steps))}" if steps else "it is not the folder of a run"
    raise usage_error(f"{name} has no step {step}", why)


def run_conversion(
    common: CommonOptions,
    ui: Ui,
    make: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    accept: Callable[[Path], bool] = Path.is_dir,
) -> Report:
    """Plan, then show (`--dry-run`) or carry out; what has an address is made here first."""
    several = (
        requested_share(common.process_options.processes, os.environ)[0].count > 1
    )  # before all else: a dry run checks it too
    url = parse_out_url(common.out)
    if url is None:
        return _run_to_folder(common, ui, make, accept)
    request = Upload(url, common.dry_run, common.overwrite, common.restart)
    if PARENT_VARIABLE in os.environ:
        return _run_to_folder(replace(common, out=request.local_folder), ui, make, accept)
    return make_and_upload(
        request, several, ui, lambda out, dry: _run_to_folder(replace(common, out=out, dry_run=dry), ui, make, accept)
    )


def _run_to_folder(
    common: CommonOptions,
    ui: Ui,
    make_plan: Callable[[Source, LocatedCheckpoint], PlannedConversion],
    is_candidate: Callable[[Path], bool],
) -> Report:
    located, source = open_checkpoint(common, ui, is_candidate)
    check_config_option(common, source)
    check_stream(common.stream, located)
    planned = make_plan(source, located)
    out = common.out or Path(planned.default_out_name)
    _check_output_location(out, source)
    ui.note(source_line(source))
    if refusal := unsupported_model_reason(source):
        ui.note(f"{source.display_name} can be converted, but not trained or sampled from: {refusal}")
    for line in planned.notes:
        ui.note(line)
    _note_plan_details(planned.plan, ui)
    fields = {"source": _source_fields(source, located), **planned.fields, **_plan_fields(planned.plan, ui)}
    fields["not_computed"] = refusal
    if common.dry_run:
        return Report(_dry_run_line(planned.plan, out), {"output": str(out), "dry_run": True, **fields})
    done, processes = _execute_plan(planned.plan, planned.source_view or source, out, common, ui)
    said = read_manifest(out) or {}
    counts = said.get("casts", [])
    for entry in counts:
        ui.note(casts.format_cast(entry))
    ui.note(_closing_line(planned.plan, done, counts, ui, common))
    fields["accounting"]["changed_values"] = _count_changed_values(counts)
    if planned.plan.zstd_level:
        fields["compress"] = packed = _compression_fields(planned.plan, said)
        ui.note(_compression_line(packed))
    fields |= {"output": str(out), "casts": counts, **_result_fields(done, common), **processes}
    return Report(str(out), fields, planned.next_command(out))


def _execute_plan(
    plan: Plan, source: Source, out: Path, common: CommonOptions, ui: Ui
) -> tuple[ConversionResult, dict[str, Any]]:
    """The output, with what this process and its workers did, and fields that tell of them."""
    asked, own_nbytes = common.process_options, anonymous_nbytes()
    share, launcher = requested_share(asked.processes, os.environ)
    if launcher:
        ui.note(f"process {share.index} of {share.count}, as {launcher} says")
    mine, *others = share.split(asked.num_workers)
    memory_nbytes = worker_memory_nbytes(common.memory_nbytes, asked.num_workers, own_nbytes)
    with WorkerPool(asked.argv, others, memory_nbytes, ui.progress()) as workers:
        options = ExecuteOptions(
            out, memory_nbytes, common.overwrite, common.restart, mine, asked.num_workers, workers.start, workers.check
        )
        options = replace(options, allow_overflow=common.allow_overflow)
        done = execute_plan(plan, source, options, workers.progress, ui.note)
        done = add_worker_reports(done, workers.wait_for_reports(), own_nbytes)
    fields = {"count": mine.count, "index": mine.index, "workers": asked.num_workers}
    return done, {"processes": fields} if mine.count > 1 else {}


def _check_output_location(out: Path, source: Source) -> None:
    """Usage PrepError where writing the output would change the source, or replacing what is there would remove it."""
    target = out.resolve()
    partial = target.with_name(target.name + ".partial")
    beside = () if source.root.is_file() else (*source.files, *source.small_files)
    held = (path.resolve().parent for path in beside)  # links may lead elsewhere
    weights = {source.root.resolve(), *(path.resolve().parent for path in source.files)}
    for root in dict.fromkeys((source.root.resolve(), *held)):
        if root in (target, partial):
            raise usage_error(f"the output {out} is the source", "sources are never written to", "`--out NAME`")
        if root in target.parents and root in weights:  # settings alone may lie where one works
            hint = f"`--out ../{out.name}`"
            raise usage_error(f"the output {out} is inside the source", "sources are never written to", hint)
        if target in root.parents:
            raise usage_error(f"the source is inside the output {out}", "it would be replaced with it", "`--out NAME`")
    for folder in (Path.cwd(), Path(os.path.expanduser("~")).resolve()):
        if target == folder or target in folder.parents:
            what = f"the output {out} would be in place of where you are, or live"
            raise usage_error(what, f"{folder} is there, and outputs replace whole folders", "`--out NAME`")


def source_line(source: Source) -> str:
    """`EleutherAI/gpt-neo-1.3B  gpt_neo  316 tensors  4.90 GiB float32`."""
    dtypes = _weight_dtypes(source)
    size = format_bytes(sum(t.nbytes for t in source.tensors))
    parts = [source.display_name, source.family.name, f"{len(source.tensors)} tensors", f"{size} {', '.join(dtypes)}"]
    if nbytes := optimizer_nbytes(source):
        parts.append(f"optimizer state {format_bytes(nbytes)}")
    if len(source.files) > 1:
        parts.append(f"{len(source.files)} files")
    return "  ".join(parts)


def unsupported_model_reason(source: Source) -> str | None:
    """Return why prep cannot compute a model of this config, None if it can."""
    try:
        source.family.arch_config(source.config)
    except PrepError as error:
        return str(error)
    return None


def _weight_dtypes(source: Source) -> list[str]:
    """Those of tensors that are not small beside the largest."""
    large = max((t.nbytes for t in source.tensors), default=0)
    return sorted({t.dtype for t in source.tensors if t.nbytes * 8 >= large})


def output_config(source: Source, vocabulary: Vocabulary, is_tied: bool, dtype: str | None = None) -> dict[str, Any]:
    """The source's config for an output with this vocabulary, in `dtype` where that was asked for; a head that became
    its own is said to be so."""
    config = with_vocabulary(source.config, vocabulary)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]  # transformers' 5 and 4
    config |= dict.fromkeys(named, dtype) if dtype else {}
    if is_tied or not source.family.is_tied(config, (source.family.tying.head_tensor,)):
        return config
    return config | {"tie_word_embeddings": False, **source.family.tying.untied_fields(config)}


def format_command_line(command: str, source: Source, options: Sequence[tuple[str, object]]) -> str:
    """The command line that asks for this, options at their defaults (None, False, empty) left out."""
    words = [f"prep {command} {source.display_name}"]
    for flag, value in options:
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [f"{flag} {each}" for each in value]
        elif value is not None and value is not False:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _note_plan_details(plan: Plan, ui: Ui) -> None:
    for leaf in plan.leaves:
        ui.note(
            f"  {leaf.name}  {list(leaf.grid.shape)} {leaf.dtype} in chunks of {list(leaf.grid.chunk_shape)}", LEAVES
        )
    for dropped in plan.dropped:
        ui.note(f"  dropped {plan.display_names.get(dropped.name, dropped.name)}: {dropped.rule}", LEAVES)


def _source_fields(source: Source, located: LocatedCheckpoint) -> dict[str, Any]:
    return {
        "name": source.display_name,
        "revision": located.revision,
        "files": len(source.files),
        "bytes": sum(fact.size for fact in source.file_stamps),
    }


def _plan_fields(plan: Plan, ui: Ui) -> dict[str, Any]:
    names = plan.display_names
    used = {s.name for s in plan.streams if s.writes and s.reads}
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
            "changed_values": None if any(stream.cast_to for stream in plan.streams) else 0,
        },
        "chunks": plan.chunk_count,
        "casts": casts.report_casts(plan.streams),
    }
    if ui.level >= LEAVES:
        fields["leaves"] = [
            {"name": x.name, "shape": x.grid.shape, "dtype": x.dtype, "chunk": x.grid.chunk_shape} for x in plan.leaves
        ]
    return fields


def _result_fields(result: ConversionResult, common: CommonOptions) -> dict[str, Any]:
    outcome = result.outcome
    seconds = outcome.seconds
    return {
        "already": result.already_done,
        "bytes": {
            "read": outcome.read_nbytes,
            "written": outcome.written_nbytes,
            "moved": outcome.read_nbytes + outcome.copied_nbytes + outcome.written_nbytes,
            "resumed": outcome.resumed_nbytes,
        },
        "memory": {"budget": common.memory_nbytes, "peak": result.peak_nbytes},
        "time": {k: round(v, 3) for k, v in (("read", seconds.read), ("move", seconds.move), ("write", seconds.write))},
    }


def _count_changed_values(counts: Sequence[Mapping[str, Any]]) -> int:
    return sum(entry["changed"] for entry in counts)


def _compression_fields(plan: Plan, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of an output's chunks, raw and as they are stored."""
    raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.chunk_counts) for leaf in plan.leaves)
    stored = sum(manifest["packed"].values())
    return {"with": manifest["compress"], "raw": raw, "stored": stored, "ratio": round(stored / max(1, raw), 4)}


def _compression_line(compression: Mapping[str, Any]) -> str:
    sizes = f"{format_bytes(compression['raw'])} compressed to {format_bytes(compression['stored'])}"
    return f"{sizes}, {compression['ratio']:.2f} x, with {compression['with']}"


def _dry_run_line(plan: Plan, out: Path) -> str:
    dropped = f", {_dropped_text(plan)}" if _dropped_text(plan) else ""
    chunks = f" in {plan.chunk_count:,} chunks of {len(plan.leaves)} leaves" if plan.leaves else ""
    return (
        f"would write {format_bytes(plan.write_nbytes)}{chunks} to {out}:"
        f" {len({s.name for s in plan.streams if s.writes})} tensors{dropped}; plan {plan_digest(plan)}"
    )


def _dropped_text(plan: Plan) -> str:
    by_rule: dict[str, int] = {}
    for dropped in plan.dropped:
        if dropped.rows:
            continue
        by_rule[dropped.rule] = by_rule.get(dropped.rule, 0) + 1
    return ", ".join(f"{count} dropped ({rule})" for rule, count in by_rule.items())


def _closing_line(
    plan: Plan, result: ConversionResult, counts: Sequence[Mapping[str, Any]], ui: Ui, common: CommonOptions
) -> str:
    if result.already_done:
        return f"already done: {result.out} was made by the same request from the same source"
    used = len({s.name for s in plan.streams if s.writes})
    memory = f"peak {result.peak_nbytes >> 20} MiB of {common.memory_nbytes >> 20}"
    parts = [f"{used} tensors", *filter(None, [_dropped_text(plan)]), f"{_count_changed_values(counts):,} values changed"]
    return f"done in {ui.clock() - ui.started_s:.1f} s, {memory}; {', '.join(parts)}"
