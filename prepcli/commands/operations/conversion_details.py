"""The details of a conversion for JSON, and its closing note."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from prepcli.core.counts import count_text
from prepcli.core.errors import PrepError, join_texts
from prepcli.core.formatting import format_bytes
from prepcli.engine.casts import report_casts
from prepcli.engine.pipeline import ConversionResult
from prepcli.execution.execute import plan_digest
from prepcli.execution.workers import ProcessOptions
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor, Plan
from prepcli.planning.shares import Share
from prepcli.planning.tensors import CastEntry
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source


class Accounting(TypedDict):
    """Number of used source tensors, and lists of the dropped and the filled tensors, for JSON.

    `changed_values` is None in the plan of a conversion with casts: the values are counted while they are cast.
    """

    tensors: int
    used: int
    dropped: list[dict[str, object]]
    filled: list[dict[str, object]]
    changed_values: int | None


class PlanFields(TypedDict):
    """A plan for JSON. `not_computed` is the reason why prep cannot run the model, or None if it can."""

    plan_digest: str
    accounting: Accounting
    chunks: int
    casts: list[CastEntry]
    not_computed: str | None


# Bytes of an output's chunks before and after compression, for JSON. Not a class, because the key
# `with` is a keyword of Python.
Compression = TypedDict(
    "Compression", {"with": str | None, "raw": int, "stored": int, "ratio": float}
)


def source_fields(source: Source, located: LocatedCheckpoint) -> dict[str, object]:
    """Return the name, revision, files and bytes of a source."""
    return {
        "name": source.display_name,
        "revision": located.files.commit,
        "files": len(source.files),
        "bytes": sum(stamp.size for stamp in source.file_stamps),
    }


def plan_fields(plan: Plan, source: Source) -> PlanFields:
    """Return the digest of a plan, the accounting of its tensors, its casts, and whether prep can run the model."""
    unsupported_reason = None
    try:
        source.family.arch_config(source.config)
    except PrepError as error:
        unsupported_reason = join_texts(" - ", [error.what, error.why])
    names = plan.display_names
    # New rows of a padded tensor are a stream of the same name that reads nothing. It is listed under `filled`.
    used = {s.name for s in plan.streams if (s.writes or not s.nbytes) and s.reads}
    return {
        "plan_digest": plan_digest(plan),
        "accounting": {
            # A union of names: a tensor that loses only padding rows is both used and dropped.
            "tensors": len(used | {d.name for d in plan.dropped}),
            "used": len(used),
            "dropped": [_dropped_fields(d, names.get(d.name, d.name)) for d in plan.dropped],
            "filled": [
                {"name": names.get(s.name, s.name), "rows": list(s.rows), "with": s.fill.kind}
                for s in plan.streams
                if s.fill
            ],
            # Only the conversion itself can count the values that a cast changes.
            "changed_values": None if any(stream.is_changed for stream in plan.streams) else 0,
        },
        "chunks": plan.chunk_count,
        "casts": report_casts(plan.streams),
        "not_computed": unsupported_reason,
    }


def _dropped_fields(dropped: DroppedTensor, display_name: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": display_name,
        "rows": dropped.rows,
        "bytes": dropped.nbytes,
        "rule": dropped.rule,
    }
    if dropped.columns is not None:
        fields["columns"] = dropped.columns
    return fields


def result_fields(result: ConversionResult, memory_nbytes: int) -> dict[str, object]:
    """Return the bytes, memory and time of a conversion."""
    return {
        "already": result.already_done,
        "bytes": {
            "read": result.read_nbytes,
            "written": result.written_nbytes,
            "moved": result.read_nbytes + result.copied_nbytes + result.written_nbytes,
            "resumed": result.resumed_nbytes,
        },
        "memory": {"budget": memory_nbytes, "peak": result.peak_nbytes},
        "time": {stage: round(seconds, 3) for stage, seconds in result.seconds.items()},
    }


def process_fields(share: Share, options: ProcessOptions) -> dict[str, int]:
    """Return how many processes and workers write an output, and the index of this process."""
    return {"count": share.count, "index": share.index, "workers": options.num_workers}


def count_changed_values(cast_counts: Sequence[CastEntry]) -> int:
    """Return how many values casts changed."""
    return sum(entry.get("changed", 0) for entry in cast_counts)


def compression_fields(plan: Plan, manifest: Manifest) -> Compression:
    """Return the raw and the stored bytes of an output's chunks, and their ratio."""
    raw = sum(leaf.chunk_nbytes * math.prod(leaf.grid.chunk_counts) for leaf in plan.leaves)
    stored = sum(manifest.packed.values())
    return {
        "with": manifest.compress,
        "raw": raw,
        "stored": stored,
        "ratio": round(stored / max(1, raw), 4),
    }


def compression_line(compression: Compression) -> str:
    """Describe the size of compressed chunks."""
    sizes = (
        f"{format_bytes(compression['raw'])} compressed to {format_bytes(compression['stored'])}"
    )
    return f"{sizes}, {compression['ratio']:.2f} x, with {compression['with']}"


def dropped_text(plan: Plan) -> str:
    """Describe the dropped tensors of a plan, by rule."""
    by_rule: dict[str, int] = {}
    for dropped in plan.dropped:
        # Rows and columns are dropped from a tensor that is kept. Only whole tensors count here.
        if dropped.rows or dropped.columns:
            continue
        by_rule[dropped.rule] = by_rule.get(dropped.rule, 0) + 1
    return ", ".join(f"{count} dropped ({rule})" for rule, count in by_rule.items())


def closing_line(
    plan: Plan,
    out: Path | str,
    result: ConversionResult,
    cast_counts: Sequence[CastEntry],
    seconds: float,
    memory_nbytes: int,
) -> str:
    """Describe a finished conversion: tensors, bytes, speed, memory and changed values."""
    if result.already_done:
        return f"already done: {out} was made by the same request from the same source"
    # A tensor without elements is part of the output, and nothing is written for it.
    used = len({s.name for s in plan.streams if s.writes or not s.nbytes})
    memory = f"peak {result.peak_nbytes >> 20} MiB of {memory_nbytes >> 20}"
    parts = [
        f"{used} tensors",
        *filter(None, [dropped_text(plan)]),
        f"{count_text(count_changed_values(cast_counts), 'value')} changed",
    ]
    return f"done in {seconds:.1f} s, {memory}; {', '.join(parts)}"
