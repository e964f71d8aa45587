"""The data of a recipe: its files on this machine, in buckets and on the hub, tokenized for the recipe's model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import NullProgress, Observer
from prepcli.execution.training_storage import TOKENS_FOLDER
from prepcli.formats.lock_file import Lock
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import num_batch_shards
from prepcli.models.rule_text import merge_rules
from prepcli.sources.generation_config import folder_generation_defaults
from prepcli.sources.locate import Access, locate, make_access
from prepcli.sources.opening import open_source
from prepcli.sources.recorded_sources import apply_lock, pinned_revision
from prepcli.sources.references import advise_conversion
from prepcli.stores.addresses import parse_hub_address, parse_url
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import open_regular_file
from prepcli.stores.hub import (
    HubListing,
    cached_snapshot,
    is_hub_down,
    list_repository,
    prepare_hub,
    translate_errors,
)
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import StoreListing
from prepcli.targets.hf_folder import tokenizer_folder
from trainer.data.dataset_layout import (
    MAX_README_NBYTES,
    README,
    Selection,
    matches,
    read_metadata,
    select_files,
    select_folder_files,
)
from trainer.data.files import DataFile
from trainer.data.find_files import GLOB_SIGNS
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.recipe import Recipe, batch_shape
from trainer.run.run import Run
from trainer.run.start import (
    StartCheckpoint,
    checkpoint_tokenizer_folder,
    random_config,
    read_recipe_lock,
)
from trainer.run.storage import RUNS_FOLDER

if TYPE_CHECKING:
    from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
    from trainer.training.datasets import DataModel
    from trainer.training.source_datasets import Datasets

HUB_HINT = "`hf://datasets/OWNER/NAME`, or `hf://datasets/OWNER/NAME/FILE`"
SCHEMES = ("gs://", "s3://", "hf://")


@dataclass(frozen=True, slots=True)
class DataFinder:
    """Finder of data files by URL. It implements the trainer's `RemoteFiles`."""

    access: Access  # Time-outs and retries, and whether only the hub's cache may be used
    note: Callable[[str], None]  # Called with a message before a download

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """List the data files of a URL.

        See `RemoteFiles.find`.
        """
        if not url.startswith(SCHEMES):
            why = "supported: paths, gs://, s3:// and hf://datasets/"
            raise usage_error(f"cannot read data from {url}", why, _web_address_hint(url))
        if url.startswith("hf://"):
            files = self._find_on_hub(url, accepts, selection)
        else:
            files = self._find_in_bucket(url, accepts, selection)
        if not files:
            why = "no object of that name, no data file in a folder of that name, and no match of it as a glob"
            hint = text("check the spelling; {} sets the type of files", Key("data.type"))
            raise PrepError(f"no data in `{url}`", why, hint)
        return files

    def _find_in_bucket(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return an object, or else the data of a folder or a glob, sorted by name."""
        glob = GLOB_SIGNS.search(url)
        # List below the last folder before the first sign of a glob, e.g. `gs://b/a` of `gs://b/a/x-*`.
        literal = url.rstrip("/")
        if glob:
            literal = url[: glob.start()]
        parent, _, name = literal.rpartition("/")
        pattern = url.removeprefix(f"{parent}/")
        # `gs://b` is a whole bucket. It has no object name after the last slash.
        is_bucket = parent.endswith(":/")
        folder = parent
        if is_bucket:
            folder = url
        bucket = Bucket(parse_url(folder), retry_policy=self.access.retry_policy)
        if not glob and not is_bucket and (file := bucket.find_file(name)) is not None:
            return [_bucket_file(bucket, file)]
        if not glob and not is_bucket:
            bucket = replace(bucket, url=parse_url(url))
        files: dict[str, DataFile] = {}
        for file in bucket.list_files():
            if not any(part.startswith(".") for part in file.path.split("/")):
                files[file.path] = _bucket_file(bucket, file)
        # A glob selects files by its pattern. In a folder, the type of the data and the part of a dataset select them.
        if glob:
            names = [name for name in files if matches(name, pattern)]
        else:
            metadata = _bucket_metadata(files.get(README))
            names = select_folder_files(
                url, [*files], metadata, selection, accepts=accepts, note=self.note
            )
        return [files[name] for name in names]

    def _find_on_hub(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> list[DataFile]:
        """Return the files of a dataset on the hub, named by a URL and a selection."""
        address = parse_hub_address(url)
        if address is None or address.repo_type != "dataset":
            raise usage_error(
                f"`{url}` is an invalid URL", "it names no dataset on the hub", HUB_HINT
            )
        if address.revision and selection.revision not in (None, address.revision):
            key = Key("data.revision")
            why = text("`@{}` and {} {}", address.revision, key, selection.revision)
            raise usage_error(f"`{url}` has two revisions", why, "remove one of them")
        revision = address.revision or selection.revision
        is_offline = prepare_hub(self.access.offline, self.access.retry_policy)
        with translate_errors(address.hub_id, revision, offline=is_offline, repo_type="dataset"):
            dataset = self._open_dataset(address.hub_id, revision, is_offline=is_offline)
            metadata = read_metadata(dataset.readme())
            if address.path:
                names = sorted(name for name in dataset.names if matches(name, address.path))
            else:
                names = select_files(
                    address.hub_id,
                    dataset.names,
                    metadata,
                    selection,
                    accepts=accepts,
                )
            return [dataset.data_file(name) for name in names]

    def _open_dataset(
        self, hub_id: str, revision: str | None, *, is_offline: bool
    ) -> HubDataset | CachedDataset:
        """List the files of a dataset on the hub.

        Offline, or if the hub is down, list the files in the hub's cache instead.
        """
        if is_offline:
            return CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
        try:
            policy = self.access.retry_policy
            return HubDataset(
                list_repository(hub_id, revision, retry_policy=policy, repo_type="dataset"),
                self.note,
            )
        except Exception as error:
            if not is_hub_down(error):
                raise
            try:
                cached = CachedDataset(hub_id, cached_snapshot(hub_id, revision, "dataset"))
            except FileNotFoundError:
                raise error from None
            self.access.warn(f"the hub cannot be reached: using the files of {hub_id} in the cache")
            return cached


def _bucket_file(bucket: Bucket, file: RemoteFile) -> DataFile:
    """Return an object as a data file, which is identified by its ETag."""

    def open_stream() -> BinaryIO:
        return (StoreListing(bucket.name, bucket, [file]).root / file.path).stream(0)

    return DataFile(f"{bucket.url}/{file.path}", file.size, file.digest, open_stream)


def _bucket_metadata(readme: DataFile | None) -> Mapping[str, object]:
    """Return the metadata of the README in a bucket. It is empty without a README."""
    if readme is None:
        return {}
    with TemporaryDirectory() as folder, readme.open() as stream:
        path = Path(folder, README)
        path.write_bytes(stream.read(MAX_README_NBYTES + 1))
        return read_metadata(path, str(readme.path))


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset that the hub lists.

    Its files are downloaded into the hub's cache when they are opened.
    """

    listing: HubListing
    note: Callable[[str], None]

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        return [*self.listing.siblings]

    def readme(self) -> Path | None:
        """Download the README, if there is one, and return its path in the cache.

        The download also records the commit of the revision in the cache.
        """
        # Without a README, the download still records the commit of the revision. A later start
        # without network finds the files by it.
        names: list[str] = []
        if README in self.listing.siblings:
            names = [README]
        folder = self.listing.download(names, NullProgress())
        if names:
            return folder / README
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file, identified by the hub's hash of its content."""
        file = self.listing.remote_file(name)
        return _hub_file(self.listing.hub_id, file, partial(self._open, file))

    def _open(self, file: RemoteFile) -> BinaryIO:
        hub_id = self.listing.hub_id
        self.note(
            f"reading {file.path} of {hub_id} ({format_bytes(file.size)}) through the hub's cache"
        )
        with translate_errors(hub_id, self.listing.revision, repo_type="dataset"):
            return open_regular_file(self.listing.download_file(file.path), buffering=0)


@dataclass(frozen=True, slots=True)
class CachedDataset:
    """The files of a dataset in the hub's cache."""

    hub_id: str
    folder: Path

    @property
    def names(self) -> Sequence[str]:
        """Names of its files."""
        names: list[str] = []
        for path in self.folder.rglob("*"):
            if path.is_file():
                names.append(str(path.relative_to(self.folder)))
        return sorted(names)

    def readme(self) -> Path | None:
        """Return the path of the README.

        None if it is not in the cache.
        """
        path = self.folder / README
        if path.is_file():
            return path
        return None

    def data_file(self, name: str) -> DataFile:
        """Return a file with the hub's digest of its content.

        A file in the cache is a link. The name of the link's target is the digest.
        """
        path = self.folder / name
        file = RemoteFile(name, path.stat().st_size, os.path.basename(os.path.realpath(path)))
        return _hub_file(self.hub_id, file, partial(open_regular_file, path, buffering=0))


def _hub_file(hub_id: str, file: RemoteFile, open_file: Callable[[], BinaryIO]) -> DataFile:
    digest = file.digest.rpartition(":")[2]
    return DataFile(f"hf://datasets/{hub_id}/{file.path}", file.size, f"hub:{digest}", open_file)


def _web_address_hint(url: str) -> str:
    """Return the name for recipes of a dataset's page on the hub, and how to read any other address."""
    address = parse_hub_address(url)
    if address is None or address.repo_type != "dataset":
        return "download it, and name the file"
    revision = f"@{address.revision}" if address.revision else ""
    path = f"/{address.path}" if address.path else ""
    return f"`hf://datasets/{address.hub_id}{revision}{path}`"


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """The parts of a recipe's model for its data."""

    model: PlannedModel  # The model, with the changes of the recipe
    tokenizer_folder: Path  # Folder with its tokenizer
    # Partition rules of its checkpoint. A run has them unless its recipe has others.
    rules: Sequence[str] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text when the model generates."""
        vocab = self.model.true_vocab_size
        defaults = folder_generation_defaults(self.model.config, self.tokenizer_folder, vocab)
        return defaults.eos_token_ids


def open_datasets(
    recipe: Recipe,
    *,
    out: Path | None,
    offline: bool,
    observer: Observer,
    checks_digests: bool = True,
) -> Datasets:
    """Return the datasets of a recipe, from the cache or tokenized now.

    Args:
        recipe: The recipe.
        out: Folder of its run. None for the default.
        offline: Use only the caches of the hub.
        observer: Receives notes and progress.
        checks_digests: See `TokenizeConfig`.

    Raises:
        PrepError: The model or the data is missing or invalid.
    """
    from trainer.training.datasets import build_datasets

    remote = DataFinder(make_access(observer, offline=offline), observer.note)
    opened = _open_checked_model(recipe, remote, offline=offline, observer=observer)
    return build_datasets(
        recipe,
        opened.model,
        model_config=opened.model.config,
        folders={"tokenizer": opened.tokenizer_folder, "cache": tokens_folder(recipe, out)},
        stop_ids=opened.stop_ids,
        remote=remote,
        checks_digests=checks_digests,
        progress=tokenize_progress(observer),
        note=observer.note,
    )


def open_run_datasets(
    run: Run,
    start: StartCheckpoint,
    model: DataModel,
    *,
    model_config: HFConfig,
    changed: Mapping[str, tuple[Any, Any]],
    scratch_dir: Path | None,
) -> Datasets:
    """Tokenize the data of a run with progress, or map the tokens of an earlier start.

    This can take hours. The next start continues it after an interruption. All processes of a job call it together.

    Args:
        run: The run.
        start: Open start checkpoint.
        model: The model to train.
        model_config: config.json of the model, with the recipe's changes.
        changed: Changed recipe keys of a resumed run, as (value when the run began, value now).
        scratch_dir: Folder for missing tokens in a dry run, which must not write to the run's folder. None
            if it is not a dry run.

    Raises:
        PrepError: The data is invalid, or does not fit the model.
    """
    from trainer.training.datasets import build_datasets

    observer = run.observer
    folders = {"tokenizer": start.tokenizer_folder, "cache": run.folder / TOKENS_FOLDER}
    if scratch_dir is not None:
        folders["spare"] = scratch_dir
    return build_datasets(
        run.recipe,
        model,
        model_config=model_config,
        folders=folders,
        stop_ids=folder_generation_defaults(
            model_config, start.tokenizer_folder, model.true_vocab_size
        ).eos_token_ids,
        group=run.group,
        remote=DataFinder(make_access(observer, offline=run.options.offline), observer.note),
        recorded=_recorded_tokens(run, start, changed),
        progress=tokenize_progress(observer),
        note=observer.note,
    )


def _recorded_tokens(
    run: Run, start: StartCheckpoint, changed: Mapping[str, tuple[Any, Any]]
) -> RecordedTokens | None:
    """Return the tokens with which a resumed run began. None for a new run, and on other processes."""
    from trainer.data.tokenize_config import BOS_KEY, RecordedTokens

    if not run.is_first or not start.resume_step:
        return None
    add_bos = run.recipe.data.add_bos
    if BOS_KEY in changed:
        add_bos, _ = changed[BOS_KEY]
    return RecordedTokens(tuple(start.step_reader.manifest.data.split()), add_bos)


def open_token_configs(
    recipe: Recipe, *, out: Path | None, offline: bool, observer: Observer
) -> dict[str, TokenizeConfig]:
    """Return the config of each token store of a recipe, by name. See `tokenize_configs`.

    The arguments are as for `open_datasets`.

    Raises:
        PrepError: The model or the recipe is invalid.
    """
    from trainer.training.datasets import tokenize_configs

    remote = DataFinder(make_access(observer, offline=offline), observer.note)
    opened = _open_checked_model(recipe, remote, offline=offline, observer=observer)
    configs = tokenize_configs(
        recipe,
        opened.model,
        model_config=opened.model.config,
        folders={"tokenizer": opened.tokenizer_folder, "cache": tokens_folder(recipe, out)},
        stop_ids=opened.stop_ids,
        remote=remote,
        note=observer.note,
    )
    return dict(configs)


def tokens_folder(recipe: Recipe, out: Path | None) -> Path:
    """Return the folder of the tokens of a run, unless the recipe has a `data.cache`."""
    return (out or RUNS_FOLDER / recipe.name) / TOKENS_FOLDER


def _open_checked_model(
    recipe: Recipe, remote: DataFinder, *, offline: bool, observer: Observer
) -> RecipeModel:
    """Return the model of a recipe, after the checks of both. See `open_recipe_model`."""
    from trainer.run.checks import check_inputs, check_model

    # A missing data file is found before a model is located, which may read a remote one.
    check_inputs(recipe, remote)
    opened = open_recipe_model(recipe, offline=offline, observer=observer)
    check_model(recipe, opened.model)
    return opened


def check_planned_recipe(recipe: Recipe, model: PlannedModel, *, names_data: bool) -> None:
    """Check a recipe whose data and tokenizer may be on another machine. No network is used.

    Args:
        recipe: The recipe.
        model: Its model.
        names_data: Whether the recipe names data. The recipe of a checkpoint to plan has a placeholder.

    Raises:
        PrepError: The recipe does not fit its model, or the inputs that are on this machine.
    """
    from trainer.run.checks import check_inputs, check_model

    if names_data:
        check_inputs(recipe, may_be_absent=True)
    check_model(recipe, model)


def open_recipe_model(recipe: Recipe, *, offline: bool, observer: Observer) -> RecipeModel:
    """Return the model of a recipe. Only the headers and the small files of a checkpoint are read.

    With a `model.lock`, they are compared with it.

    Args:
        recipe: The recipe.
        offline: Use only the cache of the hub.
        observer: Receives notes and progress.

    Raises:
        PrepError: The checkpoint is missing or invalid, or differs from its lock.
    """
    if recipe.model.path is None:
        model = model_of_config(random_config(recipe.model))
        folder = tokenizer_folder(recipe.data.tokenizer, recipe.model.config)
        return RecipeModel(model.of_recipe(recipe.model), folder)
    lock: Lock | None = None
    revision: str | None = None
    if recipe.model.lock is not None:
        lock = read_recipe_lock(recipe)
        revision = pinned_revision(recipe.model.path, None, lock)
    access = make_access(observer, offline=offline, stream=True, allow_urls=True)
    with advise_conversion(recipe.model.path):
        located = locate(recipe.model.path, revision, access=access)
        source = open_source(located)
    if lock is not None:
        source = apply_lock(source, lock, str(recipe.model.lock), located.files.commit)
    if source.tree_manifest.is_tree:
        model = model_of_manifest(source.tree_manifest)
    else:
        model = model_of_config(source.config)
    return RecipeModel(
        model.of_recipe(recipe.model),
        checkpoint_tokenizer_folder(source),
        rules=source.tree_manifest.rules,
    )


def run_batch_size(recipe: Recipe, *, offline: bool, observer: Observer) -> int:
    """Return the sequences of a step of a recipe. Without `batch.size`, the model may be opened for its rules.

    Raises:
        UsageError: The size depends on the number of devices, and the mesh does not name it.
        PrepError: The model cannot be opened. See `open_recipe_model`.
    """
    if recipe.batch.size is not None:
        return recipe.batch.size
    mesh = parse_mesh(recipe.mesh, Key("mesh"))
    n_devices = mesh.n_devices
    rules = recipe.rules
    if rules is None:
        rules = open_recipe_model(recipe, offline=offline, observer=observer).rules
    n_replicas = num_batch_shards(mesh, merge_rules(rules, origin=Key("rules")))
    return batch_shape(recipe.batch, n_devices=n_devices, n_replicas=n_replicas).size


def tokenize_progress(observer: Observer) -> Callable[[int, int, int], None]:
    """Return a callback that shows the progress of tokenizing, one bar per dataset.

    It takes the bytes done, the total bytes, and the tokens made. The first call for a dataset has the bytes and tokens
    of an interrupted run.
    """
    progress = observer.progress()
    done_nbytes = -1  # -1: no dataset is in progress
    shown_tokens = ""

    def report_progress(nbytes: int, total: int, n_tokens: int) -> None:
        nonlocal done_nbytes, shown_tokens
        if done_nbytes < 0:
            progress.begin("tokenize", total, nbytes)
            done_nbytes = nbytes
        decimals = 1
        if n_tokens >= 10_000_000:
            decimals = 0
        tokens = f"{n_tokens / 1e6:,.{decimals}f} M tokens"
        # `--progress json` prints an event per note, without a minimum interval.
        # The text changes at most once per 0.1 M tokens, and only a changed text is passed on.
        if n_tokens and tokens != shown_tokens:
            progress.note(tokens)
            shown_tokens = tokens
        progress.advance(nbytes - done_nbytes)
        done_nbytes = nbytes
        if nbytes >= total:
            progress.end()
            done_nbytes = -1

    return report_progress
