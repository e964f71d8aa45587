"""The start checkpoint of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conflicts import check_stream
from prepcli.commands.conversion import note_unrecorded, output_config
from prepcli.commands.random_start import RandomReader, random_config, random_start
from prepcli.commands.tokenizer_files import tokenizer_folder, with_recipe_tokenizer
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Ui
from prepcli.errors import usage_error
from prepcli.execution.run_place import RunPlace
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import STATE_ITEM, find_manifest_folder, read_manifest
from prepcli.formats.orbax import find_item
from prepcli.remote.placeholders import rename_in_errors
from prepcli.restore.digest_checks import RECREATE_HINT, check_tensors, sample_digest
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.params import open_weights
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.folders import Access
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor, read_config, small_files
from prepcli.targets.hf_folder import copied_files, copied_small_files
from prepcli.targets.training_step import StartModel
from trainer.models.rule_text import merge_rules
from trainer.planning.model_shapes import recipe_config
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext


def damage_hint(place: RunPlace, step: int) -> str:
    """Return the user's options if a step of a run is damaged."""
    earlier_steps = [earlier for earlier in place.known_steps() if earlier < step]
    if not earlier_steps:
        return "`--restart` starts the run again"
    return f"move {place.step_name(step)} away: the run then resumes from step {earlier_steps[-1]}"


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


def check_restart_source(start: StartCheckpoint, place: RunPlace, recipe: Recipe) -> None:
    """Raise UsageError if a restarted run would start from one of its own steps, which it deletes."""
    source = recipe.model.path if isinstance(start.model, StartModel) else str(start.model)
    if source is not None and place.contains(source):
        what = f"`--restart` would delete {source if isinstance(start.model, StartModel) else start.model.parent}"
        raise usage_error(what, "the run starts from it: it is the recipe's `model.path`", "another `name`")


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Open checkpoint that a run starts or resumes from.

    Attributes:
        reader: Reader of its parameters, and of the training state if it is a step; of no leaves for a random start.
        model: Folder of an Orbax checkpoint of prep, or the settings and files of another model.
        tokenizer_folder: Folder with the tokenizer.
        resume_step: Step of the run, if the checkpoint is one; 0 for another model.
        hint: The user's options if the checkpoint is damaged.
        name: URL of the checkpoint, if its folder has only placeholders of its files.
        lora: Settings of the trained adapters of the run; None if it trains all parameters.
        adapters: Reader of the adapters, and of the training state if the run is resumed; None for new ones.
    """

    reader: ItemReader | WeightsReader | RandomReader
    model: Path | StartModel
    tokenizer_folder: Path
    resume_step: int = 0
    hint: str = RECREATE_HINT
    name: str = ""
    lora: Mapping[str, Any] | None = None
    adapters: ItemReader | WeightsReader | None = None

    def rename_in_errors(self) -> AbstractContextManager[None]:
        """Replace the folder of placeholders by the URL in the PrepErrors of the block."""
        if not (self.name and isinstance(self.reader, ItemReader)):
            return nullcontext()
        return rename_in_errors(self.reader.folder, f"{self.name}/{STATE_ITEM}")

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Manifest that describes the model."""
        manifest = self.model.manifest if isinstance(self.model, StartModel) else self.reader.manifest
        return manifest if self.lora is None else {**manifest, "lora": self.lora}

    @property
    def state_reader(self) -> ItemReader | WeightsReader | RandomReader:
        """Reader of the training state, if the run is resumed."""
        return self.adapters or self.reader

    def check_remaining(self, ui: Ui, *, has_state: bool) -> None:
        """Check a checkpoint without checksums of its chunks; others are checked as they are read.

        Args:
            ui: Receives a note and progress.
            has_state: Check the state of the optimizer as well.

        Raises:
            PrepError: A tensor is damaged.
        """
        if isinstance(self.reader, WeightsReader):
            note_unrecorded(self.reader.source.display_name, self.reader.source.manifest, ui)
        if isinstance(self.reader, ItemReader):
            note_unrecorded(self.name or str(self.reader.folder), self.reader.manifest, ui)
        if not isinstance(self.reader, ItemReader) or self.reader.is_checked:
            return
        source = self._open_source(self.reader)
        tensors = source.all_tensors if has_state else source.tensors
        check_without_checksums(source, tensors, ui, hint=self.hint)

    def sample_digest(self) -> str:
        """Return the `sample_digest` of the parameters on disk.

        Raises:
            PrepError: They cannot be read.
        """
        assert not isinstance(self.reader, RandomReader)
        reader = self.reader
        return sample_digest(self._open_source(reader) if isinstance(reader, ItemReader) else reader.source)

    def _open_source(self, reader: ItemReader) -> Source:
        """Open the checkpoint of a reader as a source."""
        return open_source(locate(self.name or str(reader.folder), access=Access(allow_urls=True)))


def open_last_step(place: RunPlace, step: int, *, verify: bool) -> StartCheckpoint:
    """Open the last step of a run, to resume from it."""
    hint = damage_hint(place, step)
    reader, name = place.open_step(step, verify, hint), "" if place.is_on_disk else place.step_name(step)
    return StartCheckpoint(reader, reader.folder, reader.folder / HF_FOLDER, int(reader.manifest["step"]), hint, name)


def _open_orbax_start(path: Path, recipe: Recipe, *, verify: bool) -> StartCheckpoint:
    """Open an Orbax checkpoint of prep: an init or a step of another run; see `open_reader`."""
    reader = open_reader(path, verify)
    folder = reader.folder / HF_FOLDER
    if recipe.data.tokenizer is None:
        return StartCheckpoint(reader, reader.folder, folder)
    manifest_folder = find_manifest_folder(reader.folder)
    files = copied_files(small_files(folder), manifest_folder, manifest=reader.manifest, path_prefix=f"{HF_FOLDER}/")
    model = StartModel(reader.manifest, with_recipe_tokenizer(files, recipe))
    return StartCheckpoint(reader, reader.folder if model.small_files == files else model, folder)


def open_model_start(
    recipe: Recipe,
    *,
    sharding: ShardingContext,
    access: Access,
    verify: bool,
    check_config: Callable[[Mapping[str, Any]], None],
) -> StartCheckpoint:
    """Open the recipe's model: a checkpoint of any format, converted while it is read, or a random start.

    Args:
        recipe: The recipe.
        sharding: Mesh and rules of the recipe.
        access: How a remote checkpoint may be read.
        verify: Check the bytes against the digests of the checkpoint.
        check_config: Called with the config.json of a model, with the recipe's rotary embedding, before its tensors are
            matched.

    Raises:
        PrepError: There is no checkpoint, it does not fit its family, or `check_config` raises.
    """
    from trainer.training.preflight import check_batch

    if recipe.model.path is None:
        return _open_random_start(recipe, sharding, check_config)
    located = locate(recipe.model.path, access=access)
    check_stream(access.stream, located)
    path, is_local = located.local_files.path, located.local_files.remote is None
    if located.kind == "orbax" and is_local and _is_written_by_prep(path):
        return _open_orbax_start(path, recipe, verify=verify)
    check_batch(recipe, sharding)
    if (path / CONFIG).is_file():
        check_config(recipe_config(read_config(path / CONFIG), recipe.model))
    source = open_source(located)
    rules = source.tree_manifest.get("rules", ()) if recipe.rules is None else recipe.rules
    reader = open_weights(source, sharding.mesh, merge_rules(rules), verify=verify)
    manifest = start_manifest(source, reader, located.model_name) | {"mesh": str(sharding.mesh), "rules": rules}
    files = copied_small_files(source, f"{HF_FOLDER}/")
    return StartCheckpoint(
        reader, StartModel(manifest, with_recipe_tokenizer(files, recipe)), _tokenizer_folder(source)
    )


def _open_random_start(
    recipe: Recipe, sharding: ShardingContext, check_config: Callable[[Mapping[str, Any]], None]
) -> StartCheckpoint:
    """Return the start of a run with random parameters; arguments as for `open_model_start`."""
    assert sharding.mesh is not None
    model = random_start(recipe, sharding.mesh, recipe.rules or ())
    check_config(recipe_config(random_config(recipe.model), recipe.model))
    return StartCheckpoint(RandomReader(model.manifest), model, tokenizer_folder(recipe))


def start_manifest(source: Source, reader: WeightsReader, name: str) -> dict[str, Any]:
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
