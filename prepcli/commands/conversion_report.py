"""Report fields and messages of conversions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prepcli.console.formatting import format_bytes
from prepcli.console.ui import LEAVES, Ui
from prepcli.engine import casts
from prepcli.execution.execute import ConversionResult, plan_digest
from prepcli.planning.plan import Plan
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source


def note_plan_details(plan: Plan, ui: Ui) -> None:
    """Print one line per leaf and per dropped tensor, at `-v`."""
    for leaf in plan.leaves:
        ui.note(
            f"  {leaf.name}  {list(leaf.grid.shape)} {leaf.dtype} in chunks of {list(leaf.grid.chunk_shape)}", LEAVES
        )
    for dropped in plan.dropped:
        ui.note(f"  dropped {plan.display_names.get(dropped.name, dropped.name)}: {dropped.rule}", LEAVES)


def source_fields(source: Source, located: LocatedCheckpoint) -> dict[str, Any]:
    """Return the name, revision, files and bytes of a source."""
    return {
        "name": source.display_name,
        "revision": located.local_files.commit,
        "files": len(source.files),
        "bytes": sum(stamp.size for stamp in source.file_stamps),
    }


def plan_fields(plan: Plan, ui: Ui) -> dict[str, Any]:
    """Return the digest of a plan, the accounting of its tensors and its casts; leaves too at `-v`."""
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
            "changed_values": None if any(stream.is_changed for stream in plan.streams) else 0,
        },
        "chunks": plan.chunk_count,
        "casts": casts.report_casts(plan.streams),
    }
    if ui.level >= LEAVES:
        fields["leaves"] = [
            {"name": x.name, "shape": x.grid.shape, "dtype": x.dtype, "chunk": x.grid.chunk_shape} for x in plan.leaves
        ]
    return fields


def result_fields(result: ConversionResult, memory_nbytes: int) -> dict[str, Any]:
    """Return the bytes, memory and time of a conversion."""
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
        "memory": {"budget": memory_nbytes, "peak": result.peak_nbytes},
        "time": {k: round(v, 3) for k, v in (("read", seconds.read), ("move", seconds.move), ("write", seconds.write))},
    }


def count_changed_values(cast_counts: Sequence[Mapping[str, Any]]) -> int:
    """Return how many values casts changed."""
    return sum(entry["changed"] for entry in cast_counts)


def compression_fields(plan: Plan, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the raw and the stored bytes of an output's chunks, and their ratio."""
    raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.chunk_counts) for leaf in plan.leaves)
    stored = sum(manifest["packed"].values())
    return {"with": manifest["compress"], "raw": raw, "stored": stored, "ratio": round(stored / max(1, raw), 4)}


def compression_line(compression: Mapping[str, Any]) -> str:
    """Describe the size of compressed chunks."""
    sizes = f"{format_bytes(compression['raw'])} compressed to {format_bytes(compression['stored'])}"
    return f"{sizes}, {compression['ratio']:.2f} x, with {compression['with']}"


def dry_run_line(plan: Plan, out: Path) -> str:
    """Describe the output of a plan."""
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


def closing_line(
    plan: Plan, result: ConversionResult, cast_counts: Sequence[Mapping[str, Any]], ui: Ui, memory_nbytes: int
) -> str:
    """Describe a finished conversion: tensors, bytes, speed, memory and changed values."""
    if result.already_done:
        return f"already done: {result.out} was made by the same request from the same source"
    used = len({s.name for s in plan.streams if s.writes})
    memory = f"peak {result.peak_nbytes >> 20} MiB of {memory_nbytes >> 20}"
    parts = [
        f"{used} tensors",
        *filter(None, [_dropped_text(plan)]),
        f"{count_changed_values(cast_counts):,} values changed",
    ]
    return f"done in {ui.clock() - ui.started_s:.1f} s, {memory}; {', '.join(parts)}"
