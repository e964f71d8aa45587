"""Notes about the source and the plan of a conversion, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from prepcli.commands.operations.source_line import source_line
from prepcli.core.errors import Command, Option, text
from prepcli.core.lists import join_names
from prepcli.core.observer import LEAVES, Observer
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.plan import Plan
from prepcli.sources.source import Source
from prepcli.sources.vocabulary_tensors import prediction_vocabulary

# A message names at most this many files left out of the output.
MAX_LEFT_FILES = 5


def note_plan(
    plan: Plan,
    notes: Sequence[str],
    source: Source,
    unsupported_reason: str | None,
    observer: Observer,
) -> None:
    """Note the source and the plan, at `-v` also each leaf and each dropped tensor."""
    observer.note(source_line(source))
    if source.family.is_verbatim:
        observer.warn(f"{source.display_name}: {CANNOT_TRAIN}")
    elif unsupported_reason:
        observer.warn(
            f"{source.display_name} can be converted, but not trained or sampled from:"
            f" {unsupported_reason}"
        )
    _warn_of_prediction_rows(plan, source, observer)
    if source.left_files:
        names = join_names([file.name for file in source.left_files], max_names=MAX_LEFT_FILES)
        observer.note(text("not copied: {} ({} copies them)", names, Option("copy", "GLOB")))
    if source.omitted:
        names = join_names(source.omitted, max_names=MAX_LEFT_FILES)
        observer.note(f"left out: {names}")
    for line in notes:
        observer.note(line)
    for leaf in plan.leaves:
        grid = leaf.grid
        chunks = f"in chunks of {list(grid.chunk_shape)}"
        observer.note(f"  {leaf.name}  {list(grid.shape)} {leaf.dtype} {chunks}", LEAVES)
    for dropped in plan.dropped:
        name = plan.display_names.get(dropped.name, dropped.name)
        observer.note(f"  dropped {name}: {dropped.rule}", LEAVES)


def _warn_of_prediction_rows(plan: Plan, source: Source, observer: Observer) -> None:
    """Warn of embeddings and heads of multi-token prediction that fit neither the source nor the output."""
    vocabulary = plan.settings.get("vocab")
    if not source.tower_tensors or vocabulary is None:
        return
    num_rows = vocabulary["padded"]
    written_rows: dict[str, int] = {}
    for stream in plan.streams:
        if stream.writes:
            written_rows[stream.name] = stream.rows[1]
    names: list[str] = []
    for tensor in prediction_vocabulary(source):
        # An output without towers does not write the tensor.
        if written_rows.get(tensor.name, num_rows) != num_rows:
            names.append(source.file_name(tensor))
    if names:
        listed = join_names(names, max_names=MAX_LEFT_FILES)
        command = Command("export", source.display_name, Option("text_only", True))
        what = f"multi-token prediction has other vocabulary rows than its model: {listed}"
        observer.warn(text("{} ({} leaves it out)", what, command))
