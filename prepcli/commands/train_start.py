"""The checkpoint that a training run starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conversion import CommonOptions, make_access
from prepcli.commands.save_init import SaveInitRequest, save_init
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Ui
from prepcli.errors import usage_error
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import read_manifest
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.restore.digest_checks import RECREATE_HINT, check_tensors
from prepcli.restore.item_reader import ItemReader
from prepcli.sources.locate import locate
from prepcli.sources.source import CONFIG, Source, SourceTensor, read_config
from trainer.models.rope_overrides import override_rope
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext

INIT_FOLDER = "init"  # in a run's folder: the Orbax checkpoint converted from a Hugging Face model


CONVERSION_MEMORY_NBYTES = 512 << 20  # memory budget of the conversion of a Hugging Face model


def damage_hint(folder: Path, checkpoint: Path) -> str:
    """Return the user's options if the start checkpoint is damaged."""
    steps = saved_steps(folder)
    if steps and step_folder(folder, steps[-1]) in (checkpoint, checkpoint.parent):
        if len(steps) == 1:
            return "`--restart` starts the run again"
        return f"move {step_folder(folder, steps[-1])} away: the run then resumes from step {steps[-2]}"
    if folder / INIT_FOLDER in checkpoint.parents:
        return f"remove {checkpoint}: the next start converts it again"
    return RECREATE_HINT


def check_without_checksums(
    source: Source, tensors: Sequence[SourceTensor], ui: Ui, *, hint: str = RECREATE_HINT
) -> None:
    """Check the digests of whole tensors, for a checkpoint of an earlier prep without checksums of its chunks.

    Args:
        source: Opened checkpoint.
        tensors: Tensors to read and check; tensors without digests are skipped.
        ui: Receives a note and progress.
        hint: Hint of the error for a damaged tensor.

    Raises:
        PrepError: A tensor is damaged.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.digests)
    if not nbytes:
        return
    cost = f"checking it reads another {format_bytes(nbytes)}"
    name = f"{source.display_name} has no {CHECKSUMS_FILE} (written by an earlier prep)"
    ui.note(f"{name}: {cost}; `prep reshard` writes a checkpoint with checksums")
    check_tensors(source, tensors, ui.progress(), hint)


def check_restart_source(reader: ItemReader, folder: Path) -> None:
    """Raise UsageError if a restarted run would start from one of its own steps, which it deletes."""
    own_steps = {step_folder(folder, step).resolve() for step in saved_steps(folder)}
    if not own_steps.isdisjoint(reader.folder.resolve().parents):
        what = f"`--restart` would delete {reader.folder.parent}"
        raise usage_error(what, "the run starts from it: it is the recipe's `model.path`", "another `name`")


def resolve_init(
    recipe: Recipe,
    folder: Path,
    *,
    sharding: ShardingContext,
    offline: bool,
    dry_run: bool,
    check_config: Callable[[Mapping[str, Any]], None],
    ui: Ui,
) -> Path:
    """Return the recipe's Orbax checkpoint; convert the recipe's model first if it is a Hugging Face checkpoint.

    Args:
        recipe: The recipe.
        folder: Folder of the run.
        sharding: Mesh and rules of the recipe.
        offline: Use only the hub's cache.
        dry_run: Convert nothing.
        check_config: Called with the config.json of a model, with the recipe's rotary embedding, before its conversion.
        ui: Receives notes and progress.

    Raises:
        PrepError: There is no checkpoint, it cannot be converted, or `check_config` raises.
    """
    from trainer.training.preflight import check_batch

    located = locate(recipe.model.path, access=make_access(ui, offline=offline))
    if located.kind == "orbax":
        return located.local_files.path
    check_batch(recipe, sharding)  # fails before the conversion
    mesh = str(sharding.mesh)
    config_path = located.local_files.path / CONFIG
    if config_path.is_file():
        check_config(override_rope(read_config(config_path), recipe.model.rope_overrides))
    out = folder / INIT_FOLDER / f"{located.model_name}-init"
    if dry_run:
        return _existing_init(out, recipe.model.path, mesh)
    options = "".join([f"--mesh {mesh} --pad-vocab auto", *(f" --rule '{rule}'" for rule in recipe.rules or ())])
    ui.note(f"{recipe.model.path} is a Hugging Face folder: prep save-init {options} --out {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    common = CommonOptions(
        checkpoint=recipe.model.path,
        out=out,
        memory_nbytes=CONVERSION_MEMORY_NBYTES,
        overwrite=True,  # of an init for another mesh or another model
        offline=offline,
    )
    save_init(SaveInitRequest(common, mesh=mesh, rules=recipe.rules or (), pad_vocab="auto"), ui)
    return out


def _existing_init(out: Path, model: str, mesh: str) -> Path:
    """Return the init of an earlier start; raise UsageError if there is none for this mesh."""
    manifest = read_manifest(out) if out.exists() else None
    if manifest is None or manifest["mesh"] != mesh:
        why, hint = "it must be converted first, and a dry run writes nothing", f"`prep save-init {model}`"
        raise usage_error(f"{model} is a Hugging Face folder", why, hint)
    return out
