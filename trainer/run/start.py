"""The first checkpoint of a run: a step, an init, a model of another format, or random parameters.

A run with LoRA has two: the frozen base and the adapters.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# A reader has the manifest of a complete model, so its optional keys exist.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.core.observer import Observer
from prepcli.execution.training_storage import RunStorage
from prepcli.formats.lock_file import Lock, read_lock
from prepcli.formats.manifest import (
    RECREATE_HINT,
    find_manifest_folder,
    origin_record,
    read_manifest,
)
from prepcli.formats.orbax import find_item
from prepcli.models.lora_config import lora_from_manifest
from prepcli.models.parameters import VERBATIM, read_size
from prepcli.models.registry import family_of
from prepcli.models.rules import merge_rules
from prepcli.models.text_part import text_section
from prepcli.planning.manifest_fields import Manifest, OriginRecord
from prepcli.planning.tensors import LeafSpec
from prepcli.restore.digest_checks import (
    check_without_checksums,
    note_missing_file_digests,
    sample_digest,
    towers_digest,
)
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import LocatedCheckpoint, check_stream, locate
from prepcli.sources.model_family import towers_entry, verbatim_error
from prepcli.sources.open_folder import Access
from prepcli.sources.openers.peft_settings import read_adapter_family
from prepcli.sources.openers.tensor_files import open_adapter
from prepcli.sources.opening import open_source
from prepcli.sources.recorded_sources import apply_lock, pinned_revision
from prepcli.sources.references import CONFIG, advise_conversion
from prepcli.sources.side_files import find_side_files, local_folder
from prepcli.sources.source import HF_FOLDER, Source, read_config
from prepcli.sources.tensor_match import (
    TRUE_VOCAB_SIZE_KEY,
    Vocabulary,
    read_vocabulary,
    with_vocabulary,
)
from prepcli.stores.paths import AnyPath
from prepcli.targets.hf_folder import (
    copied_files,
    copied_small_files,
    output_config,
    random_start_files,
    tokenizer_folder,
    with_tokenizer,
)
from prepcli.targets.orbax_item import StartModel
from trainer.planning.model_shapes import (
    model_of_config,
    override_config,
    override_fields,
    recipe_config,
)
from trainer.recipe import Recipe
from trainer.recipe.model_table import Lora, Model
from trainer.run.params import check_lock_verified, open_weights

if TYPE_CHECKING:
    from prepcli.models.mesh import Mesh
    from trainer.distributed.sharding import ShardingContext


@dataclass(frozen=True, slots=True)
class RandomReader:
    """A CheckpointReader without leaves: the parameters are initialized on the devices."""

    manifest: Manifest  # The manifest that an init of the model would have
    is_remote = False

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """No leaves."""
        return {}

    def __enter__(self) -> RandomReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: no file is open."""


def random_config(table: Model) -> JsonObject:
    """Return the config.json of a random start, with the overrides of the recipe.

    Raises:
        PrepError: The preset is unknown, the file is missing or invalid, or a field or its value is invalid.
    """
    if table.preset is not None:
        from prepcli.models.presets import find_preset

        return override_fields(find_preset(table.preset), table.overrides)
    assert table.config is not None
    path = Path(table.config)
    if path.is_dir():
        path = path / CONFIG
    return override_fields(read_config(path), table.overrides)


def random_start(recipe: Recipe, mesh: Mesh, rules: Sequence[str]) -> StartModel:
    """Return the settings and files of a random start.

    Args:
        recipe: A recipe whose `model.init` is random.
        mesh: Mesh without axes of size -1. The vocabulary is padded to a size that it divides.
        rules: Partition rules.

    Raises:
        PrepError: The config is invalid or not supported, or there is no tokenizer.
    """
    model = model_of_config(random_config(recipe.model))
    family = family_of(model.config)
    described = model.manifest(mesh, merge_rules(rules))
    config: HFConfig = described["config"]
    padded_size = family.sizes(config)["vocab"]
    manifest = Manifest(
        config=config,
        tied=described["tied"],
        scan=described["scan"],
        scan_axis=described["scan_axis"],
        kind="init",
        family=family.name,
        vocab={
            "true": read_size(config, TRUE_VOCAB_SIZE_KEY, padded_size),
            "padded": padded_size,
        },
        layout="native",
        # No checkpoint shows how its tensors are named. A complete model with its head has the prefix,
        # e.g. `model.layers.0` of Llama.
        prefixed=True,
        mesh=str(mesh),
        rules=list(rules),
    )
    manifest |= Manifest(name=_model_name(recipe.model))
    files = random_start_files(recipe.data.tokenizer, recipe.model.config)
    return StartModel(manifest, files)


def _model_name(table: Model) -> str:
    """Return the name of the model: its preset, or the folder of its config."""
    if table.preset:
        return table.preset
    # `Path('.').name` is empty, and the resolved path ends with the name of the folder.
    path = Path(table.config or "").resolve()
    if path.is_dir():
        return path.name
    return path.parent.name


def damage_hint(storage: RunStorage, saved_steps: Sequence[int]) -> str:
    """Return the hint of the error for a damaged last step of a run."""
    if len(saved_steps) == 1:
        return text("{} starts the run again", Option("restart", True))
    *_, earlier_step, step = saved_steps
    return f"move {storage.step_name(step)} away: the run then resumes from step {earlier_step}"


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Open checkpoint to start or resume a run from."""

    # Reads the parameters of the model. With LoRA, it reads the frozen base. For a saved step it also reads the
    # optimizer state. For a random start it has no leaves.
    model_reader: ItemReader | WeightsReader | RandomReader
    # Folder of an Orbax checkpoint of prep, or the settings and files of another model
    model: AnyPath | StartModel
    tokenizer_folder: Path  # Folder with the tokenizer
    # Steps that the run has taken up to this checkpoint, the number of its last step. 0 for a new run.
    steps_taken: int = 0
    hint: str = RECREATE_HINT  # Hint of the error for a damaged checkpoint
    commit: str | None = None  # Commit of the model on the hub
    # Settings of the trained adapters. None if the run trains all parameters.
    lora: JsonObject | None = None
    # Reads the adapters, and the optimizer state if the run is resumed. None without LoRA, and if the adapters
    # are new.
    adapter_reader: ItemReader | WeightsReader | None = None

    @property
    def manifest(self) -> Manifest:
        """Manifest of the model."""
        manifest = self.model_reader.manifest
        if isinstance(self.model, StartModel):
            manifest = self.model.manifest
        if self.lora is None:
            return manifest
        return manifest | Manifest(lora=self.lora)

    @property
    def model_root(self) -> AnyPath | None:
        """Folder or file of the model's parameters. None for a random start."""
        if isinstance(self.model_reader, ItemReader):
            return self.model_reader.folder
        if isinstance(self.model_reader, WeightsReader):
            return self.model_reader.source.root
        return None

    def model_manifest(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the manifest of the model, with the recipe's changes of its config."""
        # The manifest of a step of the run has the recipe's changes already. The base of a LoRA run has not.
        if self.steps_taken and self.lora is None:
            return self.manifest
        return override_config(self.manifest, recipe)

    @property
    def step_reader(self) -> ItemReader | WeightsReader | RandomReader:
        """Reader of the step to resume from: of the adapters in a run with LoRA, else of the model."""
        return self.adapter_reader or self.model_reader

    def state_step(self, recipe: Recipe) -> int:
        """Return the step of the state that training continues: of the run, or of its `model.training_state`.

        0 without one.
        """
        if self.steps_taken or not recipe.model.training_state:
            return self.steps_taken
        return self.model_reader.manifest.step or 0

    def check_remaining(self, observer: Observer, *, reads_state: bool) -> None:
        """Compare the tensors with the digests of the manifests, if a checkpoint has no checksums of its chunks.

        Checksums of chunks are compared while the chunks are read.

        Args:
            observer: Receives a note and progress.
            reads_state: Check the state of the optimizer as well, of a run's step or of the start model.

        Raises:
            PrepError: A tensor is damaged.
        """
        for reader in (self.model_reader, self.adapter_reader):
            if isinstance(reader, WeightsReader):
                name = reader.source.display_name
                note_missing_file_digests(name, reader.source.manifest, observer)
            if not isinstance(reader, ItemReader):
                continue
            name = str(find_manifest_folder(reader.folder))
            note_missing_file_digests(name, reader.manifest, observer)
            if reader.is_checked:
                continue
            source = _stored_source(reader)
            tensors = source.tensors
            hint = RECREATE_HINT
            if reader is self.step_reader:
                hint = self.hint
                if reads_state:
                    tensors = source.all_tensors
            check_without_checksums(source, tensors, observer, hint=hint)

    def sample_digest(self) -> str:
        """Return a digest of the first rows of each parameter of the start model. See `digest_checks.sample_digest`.

        Raises:
            PrepError: A parameter is missing, or the checkpoint cannot be read.
        """
        return sample_digest(self._model_source())

    def origin(self, path: str) -> OriginRecord:
        """Return the identity of the start model of the run, for the manifests of its steps.

        Args:
            path: The recipe's path of the model.
        """
        if self.steps_taken:
            return self.step_reader.manifest.origin
        if isinstance(self.model_reader, RandomReader):
            return {"is_random": True}
        manifest: Manifest | None = self.model_reader.manifest
        if isinstance(self.model_reader, WeightsReader):
            manifest = self.model_reader.source.manifest
        record: OriginRecord = {"name": path, **origin_record(manifest, self.commit)}
        if "manifest" not in record:
            record["sample_digest"] = self.sample_digest()
        return record

    def towers_facts(self, path: str) -> dict[str, Any] | None:
        """Return the manifest's entry for the place of the towers of a multimodal model.

        The towers are all parts except the language model, e.g. the vision encoder. Saved steps do not contain them.

        Args:
            path: Path of the model.

        Returns:
            The entry with the path and the digest of the towers. None for other models, for adapters, and if the
            entry already has a digest.
        """
        entry = self.manifest.towers
        if entry is None or self.lora is not None or "digest" in entry:
            return None
        return {**entry, **stored_towers(self._model_source(), path, self.commit)}

    def _model_source(self) -> Source:
        """Return the source of the model: of its reader, or opened for an Orbax checkpoint of prep."""
        if isinstance(self.model_reader, ItemReader):
            return _stored_source(self.model_reader)
        # A random start has no digests and no towers, and the recipe checks refuse adapters on one.
        assert isinstance(self.model_reader, WeightsReader)
        return self.model_reader.source


def _stored_source(reader: ItemReader) -> Source:
    """Open the checkpoint of a reader as a source, for the digests of its tensors."""
    folder = find_manifest_folder(reader.folder)
    return open_source(locate(str(folder), access=Access(allow_urls=True)))


def stored_towers(source: Source, path: str, commit: str | None) -> dict[str, str]:
    """Return the manifest fields for the place of a model's towers (vision and audio parts).

    Args:
        source: The multimodal model.
        path: Path of the model, as the user named it.
        commit: Its commit on the hub, if it is there.
    """
    local_path = Path(path).expanduser()
    if local_path.exists():
        path = str(local_path.absolute())
    if commit is not None:
        # The branch may move before an export.
        name, _, _ = path.partition("@")
        path = f"{name}@{commit}"
    return {"path": path, "digest": towers_digest(source)}


def open_last_step(
    storage: RunStorage, saved_steps: Sequence[int], *, verify: bool
) -> StartCheckpoint:
    """Open the last step of a run, to resume from it."""
    hint = damage_hint(storage, saved_steps)
    reader = storage.open_step(saved_steps[-1], verify, hint)
    folder = reader.folder / HF_FOLDER
    return StartCheckpoint(
        reader,
        reader.folder,
        local_folder(find_side_files(folder).copied, folder),
        steps_taken=int(reader.manifest["step"]),
        hint=hint,
    )


def _open_orbax_start(path: Path, recipe: Recipe, *, verify: bool) -> StartCheckpoint:
    """Open an Orbax checkpoint of prep: an init or a step of another run. See `open_reader`."""
    reader = open_reader(path, verify)
    if reader.manifest.family == VERBATIM:
        raise verbatim_error(str(path))
    side_files = find_side_files(reader.folder / HF_FOLDER).copied
    folder = local_folder(side_files, reader.folder / HF_FOLDER)
    if recipe.data.tokenizer is None:
        return StartCheckpoint(reader, reader.folder, folder)
    manifest_folder = find_manifest_folder(reader.folder)
    files = copied_files(
        side_files,
        manifest_folder,
        manifest=reader.manifest,
        path_prefix=f"{HF_FOLDER}/",
    )
    model = StartModel(reader.manifest, with_tokenizer(files, recipe.data.tokenizer))
    # Only another tokenizer than the checkpoint's needs the files beside the checkpoint's folder.
    has_own_tokenizer = model.small_files == files
    if has_own_tokenizer:
        return StartCheckpoint(reader, reader.folder, folder)
    return StartCheckpoint(reader, model, folder)


def open_model_start(
    recipe: Recipe,
    *,
    sharding: ShardingContext,
    access: Access,
    verify: bool,
    check_config: Callable[[HFConfig], None],
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
    from trainer.training.setup import check_batch

    if recipe.model.path is None:
        return _open_random_start(recipe, sharding, check_config)
    located = locate_model(recipe.model, access)
    if access.stream:
        check_stream(located)
    # A checkpoint of prep on this machine is read as it is: each device reads the chunks of its own
    # shards. Every other source is converted while it is read, without a copy on the disk.
    path = located.files.path
    if located.kind == "orbax" and isinstance(path, Path) and _is_written_by_prep(path):
        if recipe.model.lock is not None:
            # The digests of its manifest, which the lock approves, are checked while the chunks are read.
            check_lock_verified(open_located_model(recipe.model, located), verify)
        start = _open_orbax_start(path, recipe, verify=verify)
        return replace(start, commit=located.files.commit)
    # The batch and config.json are checked first: `open_source` reads the header of every weight file.
    check_batch(recipe, sharding)
    if (path / CONFIG).is_file():
        config = read_config(path / CONFIG)
        # The text part of a multimodal model is known only with the names of its tensors.
        if text_section(config) is None:
            check_config(recipe_config(config, recipe.model))
    source = open_located_model(recipe.model, located)
    check_lock_verified(source, verify)
    if source.wrapper is not None:
        check_config(recipe_config(source.config, recipe.model))
    # None means that the recipe has no rules, and [] that all dims have the default rules.
    rules = recipe.rules
    if rules is None:
        rules = source.tree_manifest.rules
    reader = open_weights(source, sharding.mesh, merge_rules(rules), verify=verify)
    manifest = start_manifest(source, reader, located.model_name)
    manifest |= Manifest(mesh=str(sharding.mesh), rules=rules)
    files = copied_small_files(source, f"{HF_FOLDER}/")
    return StartCheckpoint(
        reader,
        StartModel(manifest, with_tokenizer(files, recipe.data.tokenizer)),
        checkpoint_tokenizer_folder(source),
        commit=located.files.commit,
    )


def locate_model(table: Model, access: Access) -> LocatedCheckpoint:
    """Locate the model of a recipe, at the revision of its lock."""
    assert table.path is not None
    revision = None
    if table.lock is not None:
        revision = pinned_revision(table.path, None, _read_lock(table.lock))
    with advise_conversion(table.path):
        return locate(table.path, revision, access=access)


def open_located_model(table: Model, located: LocatedCheckpoint) -> Source:
    """Open the model of a recipe. With a lock, it has the digests of the lock. Raise PrepError if they differ."""
    assert table.path is not None
    with advise_conversion(table.path):
        source = open_source(located)
    if table.lock is None:
        return source
    return apply_lock(source, _read_lock(table.lock), table.lock, located.files.commit)


def _read_lock(path: str) -> Lock:
    return read_lock(Path(path).expanduser())


def _open_random_start(
    recipe: Recipe, sharding: ShardingContext, check_config: Callable[[HFConfig], None]
) -> StartCheckpoint:
    """Return the start of a run with random parameters. The arguments are as for `open_model_start`."""
    assert sharding.mesh is not None
    model = random_start(recipe, sharding.mesh, recipe.rules or ())
    check_config(recipe_config(random_config(recipe.model), recipe.model))
    folder = tokenizer_folder(recipe.data.tokenizer, recipe.model.config)
    return StartCheckpoint(RandomReader(model.manifest), model, folder)


def start_manifest(source: Source, reader: WeightsReader, name: str) -> Manifest:
    """Return the manifest of `save-init` for the leaves of a reader, without mesh and rules."""
    vocabulary = reader.vocabulary
    manifest = reader.manifest | Manifest(
        kind="init",
        name=name,
        family=source.family.name,
        config=output_config(source, vocabulary, reader.manifest.tied),
        vocab={"true": vocabulary.true_size, "padded": vocabulary.stored_size},
        layout="native",
        prefixed=source.names.is_prefixed,
    )
    return manifest | towers_entry(source)


def _is_written_by_prep(path: AnyPath) -> bool:
    """Return whether an Orbax checkpoint has the tree of prep, and not that of another trainer."""
    # Without an item, `open_reader` reports what is missing.
    item = find_item(path)
    if item is None:
        return True
    manifest = read_manifest(find_manifest_folder(item))
    return manifest is not None and not manifest.is_for_trainer


def checkpoint_tokenizer_folder(source: Source) -> Path:
    """Return the folder of the model's small files."""
    return local_folder(source.side_files, source.root)


def with_adapters(
    start: StartCheckpoint,
    table: Lora,
    storage: RunStorage,
    *,
    saved_steps: Sequence[int],
    verify: bool,
) -> StartCheckpoint:
    """Return a start checkpoint with the trained adapters of a run.

    Args:
        start: Checkpoint of the frozen parameters.
        table: The recipe's `[lora]`.
        storage: Storage of the run.
        saved_steps: Steps of the run, ascending. The last one has the adapters to resume with.
        verify: Check the bytes of the adapters against recorded checksums.

    Raises:
        PrepError: The adapters do not fit the model, or the start checkpoint has adapters only.
    """
    if start.manifest.is_adapter:
        why = "the step of a run with LoRA has only adapters"
        raise usage_error(
            text("{} is not a complete model", Key("model.path")),
            why,
            text("{} adds them to their base", Command("merge")),
        )
    config = start.manifest.config
    # A saved step has priority over `lora.path`, which is read by the first start only.
    if saved_steps:
        damaged_hint = damage_hint(storage, saved_steps)
        reader = storage.open_step(saved_steps[-1], verify, damaged_hint)
        lora = lora_from_manifest(reader.manifest)
        # The recipe of the run, which is compared first, may have been edited or lost.
        if lora is None:
            hint = text(
                "{} starts again from step 0; another {} keeps both runs",
                Option("restart", True),
                Key("name"),
            )
            raise PrepError(
                f"{storage.name} began without adapters", "its steps have all parameters", hint
            )
        return replace(
            start,
            steps_taken=int(reader.manifest["step"]),
            hint=damaged_hint,
            lora=lora.manifest_entry(),
            adapter_reader=reader,
        )
    if table.path is None:
        assert table.new_adapters is not None
        return replace(start, lora=table.new_adapters.manifest_entry())
    family = family_of(config)
    adapter = Path(table.path).expanduser()
    # Embeddings of the adapter have the rows of the vocabulary without the padding of the base.
    vocabulary = read_vocabulary(config, family.sizes(config)["vocab"])
    true_config = with_vocabulary(config, Vocabulary(vocabulary.true_size, vocabulary.true_size))
    adapter_family, lora = read_adapter_family(adapter, family, true_config)
    source = open_adapter(adapter, adapter_family, true_config)
    reader = WeightsReader(source, vocab_multiple=vocabulary.stored_size, verify=verify)
    return replace(start, lora=lora.manifest_entry(), adapter_reader=reader)
