"""What ends an output once its tensors are there: chunks compressed, where asked for, index, settings, manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prepcli.console.progress import NullProgress, Progress
from prepcli.engine.casts import moved, report
from prepcli.engine.files import io_error
from prepcli.engine.own_files import check_no_links, open_own, write_own
from prepcli.engine.pipeline import Outcome
from prepcli.execution.block_checksums import collected
from prepcli.execution.compress import Packed, pack, unpacked_nbytes
from prepcli.execution.staging import WORK, Staging
from prepcli.formats.checksums import write_checksums
from prepcli.formats.manifest import MANIFEST, manifest_bytes
from prepcli.formats.orbax import ArrayMeta
from prepcli.formats.orbax_write import Chunk, write_item, write_step
from prepcli.planning.plan import Leaf, Plan, SmallFile
from prepcli.planning.slots import PARAMS, joined, parted

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
RAW, PACKED = "raw", "packed"  # of an output that is compressed, while it is made: its chunks, and how far they are


def data_folder(plan: Plan, folder: Path) -> Path:
    """Where the data files are written: to be compressed from there, or where they stay."""
    return folder / WORK / RAW if plan.zstd_level else folder / plan.item


def finish(
    plan: Plan, stage: Staging, run: dict[str, object], outcome: Outcome, progress: Progress | None = None
) -> None:
    """Write what is not tensors: chunks compressed, if they are to be, then index, settings, manifest."""
    folder = stage.folder / plan.item
    check_no_links(stage.folder)  # of the folders: files are opened without following one
    packed = _packed(plan, stage, progress or NullProgress()) if plan.zstd_level else None
    try:
        if plan.leaves:
            metas = [ArrayMeta(x.path, x.grid.shape, x.dtype, x.grid.chunk) for x in plan.leaves]
            names = packed.files if packed else [file.path for file in plan.files]
            chunks = packed.chunks(_chunks(plan.leaves)) if packed else _chunks(plan.leaves)
            write_item(folder, metas, chunks, names, now_ns=newest_ns(plan), zstd_level=plan.zstd_level)
        if plan.item:
            write_step(stage.folder, plan.item, newest_ns(plan))
        for file in plan.small_files:
            _put(file, folder / file.path)
        said: dict[str, Any] = {"packed": dict(zip(packed.files, packed.sizes))} if packed else {}
        if plan.leaves:
            raw = [data_folder(plan, stage.folder) / file.path for file in plan.files]
            said["checksums"] = write_checksums(stage.folder, collected(plan, stage, raw))
        write_own(stage.folder / MANIFEST, manifest_bytes(_manifest(plan, run, outcome) | said))
    except OSError as error:
        raise io_error(Path(error.filename or stage.folder), error) from error


def _put(file: SmallFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.copied_from:
        with (
            open(file.copied_from, "rb", opener=_without_links) as source,
            open(open_own(path, WRITE), "wb") as target,
        ):
            shutil.copyfileobj(source, target)
    else:
        write_own(path, file.content)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)  # a real path, unless somebody has replaced it since


def _packed(plan: Plan, stage: Staging, progress: Progress) -> Packed:
    raw = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    folder, journal = stage.folder / plan.item, stage.folder / WORK / PACKED
    return pack(_chunks(plan.leaves), raw, folder, journal, plan.zstd_level or 0, progress)


def newest_ns(plan: Plan) -> int:
    """The time that the output's metadata carry: that of the source, so that two runs write the same bytes."""
    return max((0, *(fact.mtime_ns for fact in plan.sources)))  # metadata have no time before 1970


def unpacked(plan: Plan, folder: Path) -> int:
    """Bytes of an output that are still to be compressed."""
    return unpacked_nbytes(_chunks(plan.leaves), folder / WORK / PACKED) if plan.zstd_level else 0


def _chunks(leaves: tuple[Leaf, ...]) -> Iterator[Chunk]:
    """Every chunk where it was written, in no order."""
    for number, leaf in enumerate(leaves):
        for box in leaf.placed:
            for index in box.indices():
                yield Chunk(number, index, *box.places.find(index), leaf.chunk_nbytes)


def _manifest(plan: Plan, run: dict[str, object], outcome: Outcome) -> dict[str, Any]:
    return {
        **run,
        "command": plan.command,
        "source": {"name": plan.source_name, "files": [asdict(fact) for fact in plan.sources]},
        **plan.settings,
        "dropped": [{**asdict(d), "name": plan.names.get(d.name, d.name)} for d in plan.dropped],
        **({"casts": casts} if (casts := report(plan.streams, outcome.digests)) else {}),
        **_records(plan, outcome),
        "leaves": {
            leaf.name: {"shape": leaf.grid.shape, "dtype": leaf.dtype, "chunk": leaf.grid.chunk} for leaf in plan.leaves
        },
    }


def _records(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Every tensor that was written, with the rows it has there, and digests of them in pieces where it has padding.

    Those of a training state are apart: by slot, and what stands alone.
    """
    tensors: dict[str, Any] = {}
    slots: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for number, stream in enumerate(plan.streams):
        if stream.right:
            slot = parted(stream.name)[0] if plan.item else PARAMS
            shown = plan.names.get(stream.name, stream.name)
            name = shown.removeprefix(joined(slot, "")) if slot else shown
            held = tensors if slot == PARAMS else slots.setdefault(slot, {}) if slot else others
            record = held.setdefault(name, {"dtype": stream.written_dtype, "shape": stream.shape, "digests": []})
            record["digests"].append([*stream.rows, moved(outcome.digests[number]).written])
            if stream.shape:
                record["shape"] = (stream.rows[1], *stream.shape[1:])
    return {"tensors": tensors, **({"slots": slots, "others": others} if plan.item else {})}
