"""The start of a run from the moments and the step of another run or framework: `model.training_state`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.restore.item_reader import ItemReader
from prepcli.sources.source import AVERAGE_SLOT
from trainer.run.start import StartCheckpoint

if TYPE_CHECKING:
    from trainer.training.loop_config import LoopConfig
    from trainer.training.step import TrainState


def check_continued_start(start: StartCheckpoint, loop: LoopConfig) -> None:
    """Check the training state in the start checkpoint of a run.

    Raises:
        UsageError: The checkpoint has no training state.
        PrepError: Its state is of another optimizer, or the run has no step after it.
    """
    from trainer.training.step import leaf_names

    path = loop.recipe.model.path
    reader = start.model_reader
    step = None
    if isinstance(reader, ItemReader):
        step = reader.manifest.step
    if not isinstance(reader, ItemReader) or step is None:
        option = Option("training_state", True)
        raise usage_error(
            text("{} has no effect for {}", Key("model.training_state", True), path),
            "it is no step of a run of prep",
            text(
                "{} makes one from a checkpoint with moments",
                Command("save-init", path or "", option),
            ),
        )
    missing = sorted(leaf_names(loop.setup) - reader.leaves.keys())
    if missing and all(name.startswith(f"{AVERAGE_SLOT}.") for name in missing):
        raise PrepError(
            text("{} has no averages for {}", path, Key("optimizer.ema")),
            "its run has kept none",
            text("{}", Key("optimizer.ema", 0, is_override=True)),
        )
    if missing:
        raise PrepError(
            f"{path} has another optimizer state than the recipe",
            f"it lacks {missing[0]}, one of {len(missing):,} leaves",
            text("{} chooses the optimizer", Key("optimizer.type")),
        )
    if step >= loop.steps:
        raise PrepError(
            f"{path} is at step {step}",
            f"the recipe has only {loop.steps} steps",
            text("{}", Key("train.steps", 2 * step, is_override=True)),
        )


def cast_warning(start: StartCheckpoint, loop: LoopConfig) -> str:
    """Return a warning about leaves of the state with another dtype in the run. Empty if there are none."""
    import jax

    from trainer.training.step import leaf_name, state_shapes

    reader = start.model_reader
    casts: list[str] = []
    for path, shape in jax.tree_util.tree_leaves_with_path(state_shapes(loop.setup)):
        name = leaf_name(path)
        stored = reader.leaves[name].dtype
        if stored != shape.dtype.name:
            casts.append(f"{name} from {stored} to {shape.dtype.name}")
    if not casts:
        return ""
    verb = "is" if len(casts) == 1 else "are"
    return f"{count_text(len(casts), 'leaf', 'leaves')} of {loop.recipe.model.path} {verb} cast, e.g. {casts[0]}"


def unread_warning(start: StartCheckpoint, loop: LoopConfig) -> str:
    """Return a warning about unused leaves of the state. Empty if there are none."""
    from trainer.training.step import leaf_names

    unread = sorted(start.model_reader.leaves.keys() - leaf_names(loop.setup))
    if not unread:
        return ""
    path = loop.recipe.model.path
    verb = "is" if len(unread) == 1 else "are"
    return (
        f"{count_text(len(unread), 'leaf', 'leaves')} of {path} {verb} not used, e.g. {unread[0]}"
    )


def load_continued_state(start: StartCheckpoint, setup: Any) -> TrainState:
    """Read the state after `check_continued_start`."""
    from trainer.training.loading import restore_state

    reader = start.model_reader
    assert isinstance(reader, ItemReader)
    return restore_state(reader, setup)
