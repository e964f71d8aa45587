"""Checkpoint names, parsed into one typed reference, and facts about a checkpoint that its files do not state.

A name is a path, an object store URL, an alias or a hub id. Facts are e.g. the user's model config and the part of an
EasyLM file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prepcli.core.errors import Command, Key, Option, PrepError, Text, text, usage_error
from prepcli.core.formatting import shorten, suggest
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    RECIPE_FILE,
    STEP_NAME,
    is_begun_run,
    no_step_error,
    saved_steps,
    step_folder,
)
from prepcli.formats.step_scores import best_step
from prepcli.sources.aliases import ALIASES_BY_NAME
from prepcli.stores.addresses import (
    ObjectStoreUrl,
    is_url,
    parse_hub_address,
    parse_url,
)
from prepcli.stores.paths import AnyPath

CONFIG = "config.json"
PART_SEPARATOR = "::"
FLAX_PARAMS = "flax_params"
TRAIN_STATE_PARTS = ("trainstate", "trainstate_params")
# EasyLM's prefixes of a path, as in `params::PATH`.
EASYLM_PARTS = (
    *TRAIN_STATE_PARTS,
    "params",
    FLAX_PARAMS,
)

# Options of conversions, which recipes have no keys for.
CONVERSION_OPTIONS = {"config", "drop", "layers", "map", "quantized", "source_layout", "verbatim"}

# "rounded": outputs that the scale has changed. Otherwise they are refused. "all": exact ones, too.
KeptScales = Literal["none", "rounded", "all"]
# Values of `--step` other than a number.
BEST = "best"
LAST = "last"
PARTIAL_SUFFIX = ".partial"
MAX_LISTED_FOLDERS = 8
MAX_NAME_CHARS = 100
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_HUB_FILE = re.compile(rf"(?P<hub_id>{_HUB_ID.pattern})/(?P<file>[^@]+\.gguf)", re.ASCII)
_PATH_STARTS = ("./", "../", "/", "~")


@dataclass(frozen=True, slots=True)
class SourceHints:
    """Facts about a checkpoint that its files do not state.

    Attributes:
        config_path: A config.json, or a folder that contains one, for checkpoints without a config.
        part: One of EASYLM_PARTS, or an empty string.
        verbatim: True: use the verbatim family. None: use it if no family has the model_type. False: never use it.
        copied_files: Name patterns of further side files to copy.
        kept_scales: Which outputs with a scale of another trainer's layout are read as they are stored.
        layout: Layout of a tree of another library, or None for the one that fits best.
        training_state: Whether the optimizer state of another framework is read.
        drop: Patterns of tensors that may lie among those of a text part.
    """

    config_path: Path | None = None
    part: str = ""
    verbatim: bool | None = False
    copied_files: tuple[str, ...] = ()
    kept_scales: KeptScales = "none"
    layout: str | None = None
    training_state: bool = False
    drop: tuple[str, ...] = ()

    def resolve_config_path(self, folder: AnyPath, display_name: str) -> AnyPath:
        """Return the path of the config.json to use: the user's, else the one in `folder`."""
        if self.config_path:
            path: AnyPath = self.config_path.expanduser()
            if not path.exists():
                what = text("{} does not exist", Option("config", str(self.config_path)))
                hint = f"pass a {CONFIG}, or a folder with one"
                raise PrepError(what, "the weights are read by the config of their model", hint)
        else:
            path = folder
        if path.is_dir():
            path = path / CONFIG
        if self.config_path is None and not path.is_file():
            hint = text("{}: a folder with the model's {}", Option("config", "FOLDER"), CONFIG)
            raise PrepError(f"{display_name} has no {CONFIG}", f"{path} does not exist", hint)
        return path


NO_HINTS = SourceHints()


def split_part(name: str) -> tuple[str, str]:
    """Split `PART::PATH` into part and path. The part is empty unless it is one of EASYLM_PARTS."""
    part, separator, path = name.partition(PART_SEPARATOR)
    if separator and part in EASYLM_PARTS:
        return (part, path)
    return ("", name)


@contextmanager
def advise_conversion(model: str) -> Iterator[None]:
    """In the errors of the block, replace a hint with an option of conversions by the conversion that has it."""
    try:
        yield
    except PrepError as error:
        options = [part for part in getattr(error.hint, "parts", ()) if isinstance(part, Option)]
        if not any(option.name in CONVERSION_OPTIONS for option in options):
            raise
        command = Command("save-init", model, *options)
        hint = text("{}, and name its output in {}", command, Key("model.path"))
        raise error.with_texts(hint=hint) from error.__cause__


@dataclass(frozen=True, slots=True)
class LocalPath:
    """An existing folder or file.

    Attributes:
        display_name: Text that named it.
        path: Path of the folder or file.
        part: EasyLM part in the text, as `params` in `params::PATH`.
    """

    display_name: str
    path: Path
    part: str = ""

    @property
    def model_name(self) -> str:
        """Name of the folder or file."""
        return Path(os.path.abspath(self.path)).name


@dataclass(frozen=True, slots=True)
class RunStep:
    """A saved step of a training run. `run` is its folder as the user named it."""

    run: Path
    step: int

    @property
    def display_name(self) -> str:
        """Path of the step, as the user spelled the path of the run."""
        return str(step_folder(self.run, self.step))

    @property
    def path(self) -> Path:
        """Folder of the step."""
        return step_folder(self.run.expanduser(), self.step)

    @property
    def model_name(self) -> str:
        """Number of the step."""
        return str(self.step)


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A revision of a repository on the hub. `model_name` is its alias, or the last part of its id or file."""

    display_name: str  # the hub id
    model_name: str
    revision: str | None = None  # None: `main`
    file: str = ""  # a GGUF file of the repository, or empty for the model of its top folder


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A folder in an object store. `display_name` is the URL as the user spelled it."""

    display_name: str
    url: ObjectStoreUrl

    @property
    def model_name(self) -> str:
        """Last part of the URL."""
        return (self.url.path or self.url.bucket).rpartition("/")[2]


Reference = LocalPath | RunStep | HubRepo | BucketUrl


def parse_reference(
    name: str,
    revision: str | None = None,
    *,
    step: int | str | None = None,
    cwd: Path | None = None,
) -> Reference:
    """Parse the name of a checkpoint. Existing paths take precedence, then URLs, aliases and hub ids.

    Args:
        name: A path, an object store URL, the address of a page on the hub, an alias or a hub id. An alias or hub id
            may be followed by `@REVISION`, a path may follow an EasyLM part, as in `params::PATH`.
        revision: Revision on the hub.
        step: Step of the training run `name`: its number, `best` (lowest evaluation loss) or `last`.
        cwd: Folder that relative paths start from, without `step`. The working directory by default.
    """
    if step is not None:
        return _without_revision(_parse_step(name, step), revision)
    # A path that exists comes first: a folder called `gpt2` or `owner/name` is what the user made,
    # and its result must not depend on the network.
    cwd = cwd or Path()
    part, path = split_part(name)
    folder = cwd / os.path.expanduser(path)
    # Path.exists raises for some texts, os.path.exists returns False.
    if path and os.path.exists(folder):
        return _without_revision(LocalPath(name, folder, part), revision)
    if address := parse_hub_address(name):
        hub_id = _hub_id(address.hub_id)
        if address.repo_type != "model":
            hint = text("name a model")
            if address.repo_type == "dataset":
                key = Key("data.path", f"hf://datasets/{address.hub_id}")
                hint = text("{} in a recipe reads it", key)
            raise usage_error(
                f"`{name}` is not a model", f"it is a {address.repo_type} on the hub", hint
            )
        is_gguf = address.path.endswith(".gguf")
        if address.path and not is_gguf:
            why = f"`{address.path}` is part of a model, and a model is read as a whole"
            raise usage_error(f"`{name}` is not a model", why, f"`{hub_id}`")
        if not _HUB_ID.fullmatch(hub_id):
            raise _unknown_name_error(hub_id, cwd)
        if address.revision:
            _, revision = _split_revision(f"{address.hub_id}@{address.revision}", revision)
        model_name = address.hub_id.rpartition("/")[2]
        if is_gguf:
            model_name = Path(address.path).stem
        return HubRepo(hub_id, model_name, revision, address.path)
    if is_url(name):
        return _without_revision(BucketUrl(name, parse_url(name)), revision)
    if part:
        raise _missing_path_error(path, f"follows `{part}::`", cwd)
    return _parse_hub_name(name, revision, cwd)


def default_checkpoint(cwd: Path, is_candidate: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return the only folder in `cwd` that prep wrote and for which `is_candidate` is true."""
    candidates: list[Path] = []
    for folder in _visible_folders(cwd):
        if _has_manifest(folder) and is_candidate(folder):
            candidates.append(folder)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise usage_error(
            "no checkpoint given",
            f"no suitable folder in the current folder has a {MANIFEST_FILE}",
            "name a folder, alias or hub id",
        )
    names = ", ".join(f"./{path.name}" for path in candidates)
    raise usage_error(
        "no checkpoint given",
        f"{len(candidates)} folders in the current folder have a {MANIFEST_FILE}",
        f"name one of: {names}",
    )


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder, or a step in a run folder, has a manifest."""
    try:
        if (folder / MANIFEST_FILE).is_file():
            return True
        for child in folder.iterdir():
            if child.name.isdecimal() and (child / MANIFEST_FILE).is_file():
                return True
    # Another user's folder, or one that was removed since it was listed.
    except OSError:
        pass
    return False


def _parse_step(run: str, step: int | str) -> RunStep | BucketUrl:
    """Return the reference to a run's step. Raise UsageError if a local run does not have it."""
    if isinstance(step, str) and step not in (BEST, LAST) and not STEP_NAME.fullmatch(step):
        raise usage_error(
            text("{} is invalid", Option("step", step)),
            "it takes the number of a step, best or last",
            text("{}", Option("step", LAST)),
        )
    if is_url(run):
        step_name = str(step)
        # The listing of the run's folder shows its last step, which `open_bucket_folder` selects.
        if step_name == LAST:
            return BucketUrl(run, parse_url(run))
        if step_name == BEST:
            why = "the manifests of all steps would be read over the network"
            what = text("{} is not supported for {}", Option("step", BEST), run)
            raise usage_error(what, why, text("{}", Option("step", "N")))
        url = f"{run.rstrip('/')}/{step_name}"
        return BucketUrl(url, parse_url(url))
    folder = Path(run).expanduser()
    steps = saved_steps(folder)
    if step == BEST:
        number = best_step(folder)
    elif step == LAST:
        number = steps[-1] if steps else None
    else:
        number = int(step)
    if number is not None and number in steps:
        return RunStep(Path(run), number)
    if not steps and folder.is_dir() and is_begun_run(os.listdir(folder)):
        raise no_step_error(run)
    missing = "it is not the folder of a run" if folder.is_dir() else "the folder does not exist"
    why = f"its steps are {', '.join(map(str, steps))}" if steps else missing
    if steps and step == BEST:
        why = f"{why}; none has an evaluation loss"
        hint = text("{} records it", Key("checkpoint.best", "eval_loss"))
        raise usage_error(f"{run} has no best step", why, hint)
    what = f"{run} has no step" if step in (BEST, LAST) else f"{run} has no step {step}"
    hint: str | Text = "name the folder of a run that has saved a step"
    if steps:
        hint = text("{}", Option("step", LAST))
    raise usage_error(what, why, hint)


def _without_revision(
    reference: LocalPath | RunStep | BucketUrl, revision: str | None
) -> Reference:
    """Return the reference. Raise UsageError for a revision, which only models on the hub have."""
    if revision is None:
        return reference
    what = f"`{reference.display_name}` has no revision {revision}"
    why = "it is not on the hub, and only models on the hub have revisions"
    raise usage_error(what, why, text("remove {}", Option("revision")))


def _parse_hub_name(name: str, revision: str | None, cwd: Path) -> HubRepo:
    """Parse `ALIAS`, `OWNER/NAME` or `OWNER/NAME/FILE.gguf`, each also with `@REVISION`."""
    name, revision = _split_revision(name, revision)
    match = _HUB_FILE.fullmatch(name)
    # A folder with the name of the owner shows that the user means a path.
    if match and not (cwd / name.partition("/")[0]).is_dir():
        return HubRepo(match["hub_id"], Path(match["file"]).stem, revision, match["file"])
    # A text that can only be a path is not looked up on the hub. The error of the hub would hide
    # that the folder does not exist.
    if reason := _path_reason(name):
        raise _missing_path_error(name, reason, cwd)
    # A mistyped run would be looked up on the hub, and the error would be about the network.
    owner, slash, _ = name.partition("/")
    outputs: list[Path] = []
    if slash and (cwd / owner).is_dir():
        for child in _visible_folders(cwd / owner):
            if _has_manifest(child) or (child / RECIPE_FILE).is_file():
                outputs.append(child)
    if outputs:
        reason = f"begins with the folder `{owner}/`, which has outputs of prep (`hf://{name}` would be on the hub)"
        raise _missing_path_error(name, reason, cwd)
    hub_id = _hub_id(name)
    if not _HUB_ID.fullmatch(hub_id):
        raise _unknown_name_error(name, cwd)
    return HubRepo(hub_id, name.rpartition("/")[2], revision)


def _hub_id(name: str) -> str:
    """Return the hub id of an alias, and any other name as it is."""
    return ALIASES_BY_NAME[name].hub_id if name in ALIASES_BY_NAME else name


def _split_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """Split `NAME@REVISION`. Raise UsageError if REVISION is empty or contradicts `--revision`."""
    bare_name, separator, suffix = name.rpartition("@")
    if not separator or not bare_name:
        return name, revision
    if not suffix or revision not in (None, suffix):
        if suffix:
            why = text("`@{}` and {}", suffix, Option("revision", revision))
        else:
            why = "nothing follows the @"
        raise usage_error(
            f"invalid revision in `{name}`", why, f"`{bare_name}@{revision or 'main'}`"
        )
    return bare_name, suffix


def _path_reason(name: str) -> str:
    """Return why a text must be a path. An empty string if it may be a name."""
    for start in _PATH_STARTS:
        if name.startswith(start):
            return f"begins with `{start}`"
    if name in (".", ".."):
        return f"is `{name}`"
    if name.endswith("/"):
        return "ends with `/`"
    if name.count("/") > 1:
        return "has more than one `/`"
    return ""


def _visible_folders(cwd: Path) -> list[Path]:
    """List the folders, except hidden ones and partial outputs."""
    folders: list[Path] = []
    for child in sorted(cwd.iterdir()):
        is_hidden = child.name.startswith(".") or child.name.endswith(PARTIAL_SUFFIX)
        if not is_hidden and child.is_dir():
            folders.append(child)
    return folders


def _missing_path_error(path: str, reason: str, cwd: Path) -> PrepError:
    target = cwd / os.path.expanduser(path)
    why = f"it looks like a path because it {reason}"
    if target.parent.is_dir():
        names = [folder.name for folder in _visible_folders(target.parent)]
    else:
        names = []
    if suggestion := suggest(target.name, names):
        hint = f"did you mean `{path.rstrip('/').removesuffix(target.name)}{suggestion}`?"
    elif not names:
        hint = text("{} lists the models that can be named without a path", Command("models"))
    else:
        if target.parent.resolve() == cwd.resolve():
            where = "here"
        else:
            where = f"in {target.parent}"
        listed = ", ".join(names[:MAX_LISTED_FOLDERS])
        if len(names) > MAX_LISTED_FOLDERS:
            listed += " …"
        hint = f"folders {where}: {listed}"
    return usage_error(
        f"`{shorten(path, MAX_NAME_CHARS)}` does not exist",
        why,
        hint,
    )


def _unknown_name_error(name: str, cwd: Path) -> PrepError:
    folder_names = [folder.name for folder in _visible_folders(cwd)]
    suggestion = suggest(name, [*ALIASES_BY_NAME, *folder_names])
    hint: str | Text = text("{} lists the aliases", Command("models"))
    if suggestion:
        hint = f"did you mean `{suggestion}`?"
    return usage_error(
        f"no checkpoint called `{name}`",
        "not a folder here, not an alias, and a hub id has the form owner/name",
        hint,
    )
