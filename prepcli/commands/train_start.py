"""The checkpoint that a training run starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conflicts import check_stream
from prepcli.commands.conversion import output_config
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Ui
from prepcli.errors import usage_error
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import find_manifest_folder, read_manifest
from prepcli.formats.orbax import find_item
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.restore.digest_checks import RECREATE_HINT, check_tensors
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.params import open_weights
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.folders import Access
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor, read_config
from prepcli.targets.hf_folder import copied_files
from prepcli.targets.training_step import StartModel
from trainer.models.rope_overrides import override_rope
from trainer.models.rule_text import merge_rules
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext

INIT_FOLDER = "init"  # in the folder of a run that an earlier prep began: a converted model


def damage_hint(folder: Path, checkpoint: Path) -> str:
    """Return the user's options if the start checkpoint is damaged."""
    steps = saved_steps(folder)
    if steps and step_folder(folder, steps[-1]) in (checkpoint, checkpoint.parent):
        if len(steps) == 1:
            return "`--restart` starts the run again"
        return f"move {step_folder(folder, steps[-1])} away: the run then resumes from step {steps[-2]}"
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


def check_restart_source(start: StartCheckpoint, folder: Path) -> None:
    """Raise UsageError if a restarted run would start from one of its own steps, which it deletes."""
    if isinstance(start.model, StartModel):
        return
    own_steps = {step_folder(folder, step).resolve() for step in saved_steps(folder)}
    if not own_steps.isdisjoint(start.model.resolve().parents):
        what = f"`--restart` would delete {start.model.parent}"
        raise usage_error(what, "the run starts from it: it is the recipe's `model.path`", "another `name`")


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Open checkpoint that a run starts or resumes from.

    Attributes:
        reader: Reader of its parameters, and of the training state if it is a step.
        model: Folder of an Orbax checkpoint of prep, or the settings and files of a model of another format.
        tokenizer_folder: Folder with the tokenizer.
        lora: Settings of the adapters that the run trains; None if it trains all parameters.
        adapters: Reader of the adapters, and of the training state if the run is resumed; None for new ones.
    """

    reader: ItemReader | WeightsReader
    model: Path | StartModel
    tokenizer_folder: Path
    lora: Mapping[str, Any] | None = None
    adapters: ItemReader | WeightsReader | None = None

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Manifest that describes the model."""
        manifest = self.model.manifest if isinstance(self.model, StartModel) else self.reader.manifest
        return manifest if self.lora is None else {**manifest, "lora": self.lora}

    @property
    def state_reader(self) -> ItemReader | WeightsReader:
        """Reader of the training state, if the run is resumed."""
        return self.adapters or self.reader

    def check_remaining(self, folder: Path, ui: Ui, *, has_state: bool) -> None:
        """Check a checkpoint without checksums of its chunks; others are checked as they are read.

        Args:
            folder: Folder of the run.
            ui: Receives a note and progress.
            has_state: Check the state of the optimizer as well.

        Raises:
            PrepError: A tensor is damaged.
        """
        if not isinstance(self.reader, ItemReader) or self.reader.is_checked:
            return
        source = open_source(locate(str(self.reader.folder)))
        tensors = source.all_tensors if has_state else source.tensors
        check_without_checksums(source, tensors, ui, hint=damage_hint(folder, self.reader.folder))


def open_orbax_start(path: Path, folder: Path, *, verify: bool) -> StartCheckpoint:
    """Open an Orbax checkpoint of prep: an init or a step; see `open_reader`."""
    reader = open_reader(path, verify, damage_hint(folder, path))
    return StartCheckpoint(reader, reader.folder, reader.folder / HF_FOLDER)


def open_model_start(
    recipe: Recipe,
    folder: Path,
    *,
    sharding: ShardingContext,
    access: Access,
    verify: bool,
    check_config: Callable[[Mapping[str, Any]], None],
) -> StartCheckpoint:
    """Open the recipe's model, of any format; its tensors are converted while they are read.

    Args:
        recipe: The recipe.
        folder: Folder of the run.
        sharding: Mesh and rules of the recipe.
        access: How a remote checkpoint may be read.
        verify: Check the bytes that are read against the digests of the checkpoint.
        check_config: Called with the config.json of a model, with the recipe's rotary embedding, before its tensors are
            matched.

    Raises:
        PrepError: There is no checkpoint, it does not fit its family, or `check_config` raises.
    """
    from trainer.training.preflight import check_batch

    located = locate(recipe.model.path, access=access)
    check_stream(access.stream, located)
    path, is_local = located.local_files.path, located.local_files.remote is None
    if located.kind == "orbax" and is_local and _is_written_by_prep(path):
        return open_orbax_start(path, folder, verify=verify)
    check_batch(recipe, sharding)
    if (path / CONFIG).is_file():
        check_config(override_rope(read_config(path / CONFIG), recipe.model.rope_overrides))
    source = open_source(located)
    rules = source.tree_manifest.get("rules", ()) if recipe.rules is None else recipe.rules
    reader = open_weights(source, sharding.mesh, merge_rules(rules), verify=verify)
    manifest = _start_manifest(source, reader, located.model_name) | {"mesh": str(sharding.mesh), "rules": rules}
    files = copied_files(source.small_files, source.root, path_prefix=f"{HF_FOLDER}/")
    return StartCheckpoint(reader, StartModel(manifest, files), _tokenizer_folder(source))


def _start_manifest(source: Source, reader: WeightsReader, name: str) -> dict[str, Any]:
    """Return the manifest that `prep save-init` would write for the leaves of a reader, without mesh and rules."""
    vocabulary = reader.vocabulary
    return {
        **reader.manifest,
        "kind": "init",
        "name": name,
        "family": source.family.name,
        "config": output_config(source, vocabulary, reader.manifest["tied"]),
        "vocab": {"true": vocabulary.true_size, "padded": vocabulary.stored_size},
        "layout": "native",
        "prefixed": source.names.is_prefixed,
    }


def _is_written_by_prep(path: Path) -> bool:
    """Return whether an Orbax checkpoint has a manifest."""
    item = find_item(path)
    return item is None or read_manifest(find_manifest_folder(item)) is not None


def _tokenizer_folder(source: Source) -> Path:
    """Return the folder of the model's small files."""
    return source.small_files[0].parent if source.small_files else source.root
