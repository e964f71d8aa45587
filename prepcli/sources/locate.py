"""From what a user calls a checkpoint to its folder: path > alias > hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.console.progress import NullProgress, Progress
from prepcli.errors import PrepError, usage_error
from prepcli.formats.detect import Kind, detect
from prepcli.formats.manifest import MANIFEST_FILE, find_manifest_folder, read_manifest
from prepcli.remote.object_store import is_url, parse_url
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy
from prepcli.sources.aliases import ALIASES_BY_NAME
from prepcli.sources.source_hints import split_part
from trainer.models.suggest import suggest

if TYPE_CHECKING:
    from prepcli.remote.placeholders import RemoteCheckpoint

PARTIAL_SUFFIX = ".partial"
REMOTE_KINDS = ("safetensors", "orbax")  # kinds whose tensors lie in files as they stand
MAX_LISTED_FOLDERS = 8

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_PATH_STARTS = ("./", "../", "/", "~")


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint that was found: `name` is what outputs made from it are called after, without a folder."""

    model_name: str
    path: Path
    kind: Kind
    hub_id: str | None = None
    revision: str | None = None  # the hub's commit
    remote: RemoteCheckpoint | None = None  # where it stays; `path` is then a folder that stands for it
    part: str = ""  # of a file of EasyLM's, where the name says which


@dataclass(frozen=True, slots=True)
class RevisionedName:
    """What a user asked for, before anything was looked up."""

    name: str
    revision: str | None


def locate(
    checkpoint: str,
    revision: str | None = None,
    offline: bool = False,
    cwd: Path | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], object] = str,
    stream: bool = False,
    allow_remote: bool = False,
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> LocatedCheckpoint:
    """The checkpoint called `name`: a folder, an address in an object store, an alias, or a hub id, in that order;
    `NAME@REVISION` for the last two.

    What is on the hub is downloaded, told to `progress`; `warn` hears when the hub is away and its cache serves. With
    `stream` it stays there, as what has an address does; then the caller reads what `remote` says, which `afar`
    promises. `patience` limits each request.
    Raises PrepError: of usage where nothing can be meant, else where it is not there, not readable or not a format
    that prep reads.
    """
    cwd = cwd or Path()
    part, path = split_part(checkpoint)
    folder = cwd / os.path.expanduser(path)
    if path and os.path.exists(folder):  # unlike Path.exists, False for any text
        if revision is not None:
            raise usage_error(
                f"`{checkpoint}` is a folder and has no revision {revision}", "revisions belong to the hub"
            )
        return replace(_local(folder, checkpoint), part=part)
    if is_url(checkpoint):
        return _at_an_address(checkpoint, revision, offline, allow_remote, retry_policy)
    if part:
        raise _no_such_path(path, f"follows `{part}::`", cwd)
    asked = _split(checkpoint, revision)
    if reason := _path_reason(asked.name):
        raise _no_such_path(asked.name, reason, cwd)
    alias = ALIASES_BY_NAME.get(asked.name)
    hub_id = alias.hub_id if alias is not None else asked.name
    if not _HUB_ID.fullmatch(hub_id):
        raise _unknown(asked.name, cwd)
    if stream:
        return _streamed(hub_id, asked, offline, retry_policy)
    return _on_the_hub(hub_id, asked, offline, progress or NullProgress(), warn, retry_policy)


def default_checkpoint(cwd: Path, accept: Callable[[Path], bool] = Path.is_dir) -> Path:
    """The one prep folder or run in `cwd`, of those that `accept` takes; usage PrepError for none or several."""
    found = sorted(child for child in _folders(cwd) if _is_ours(child) and accept(child))
    if len(found) == 1:
        return found[0]
    if not found:
        raise usage_error(
            "no checkpoint was named", f"no folder here holds a {MANIFEST_FILE}", "name a folder, alias or hub id"
        )
    names = ", ".join(f"./{path.name}" for path in found)
    raise usage_error("no checkpoint was named", f"{len(found)} folders here could be meant", f"one of: {names}")


def _is_ours(folder: Path) -> bool:
    """Whether a folder, or a step of the run that it is, has a manifest."""
    try:
        steps = (child for child in folder.iterdir() if child.name.isdecimal())
        return (folder / MANIFEST_FILE).is_file() or any((step / MANIFEST_FILE).is_file() for step in steps)
    except OSError:
        return False


def _split(name: str, revision: str | None) -> RevisionedName:
    text, at, after = name.rpartition("@")
    if not at or not text:
        return RevisionedName(name, revision)
    if not after or revision not in (None, after):
        why = f"`@{after}` and `--revision {revision}`" if after else "nothing follows the @"
        raise usage_error(f"`{name}` names no single revision", why, f"`{text}@{revision or 'main'}`")
    return RevisionedName(text, after)


def _path_reason(text: str) -> str:
    """Why a text can only be meant as a path; empty where it could be a name."""
    start = next((start for start in _PATH_STARTS if text.startswith(start)), None)
    if start is not None:
        return f"begins with `{start}`"
    if text in (".", ".."):
        return f"is `{text}`"
    if text.endswith("/"):
        return "ends with `/`"
    return "has more than one `/`" if text.count("/") > 1 else ""


def _local(folder: Path, shown: str) -> LocatedCheckpoint:
    kind = detect(folder, shown)
    return LocatedCheckpoint(_manifest_name(folder) or Path(os.path.abspath(folder)).name, folder, kind)


def _manifest_name(folder: Path) -> str:
    """The model's name as the manifest keeps it; a name with a slash would leave the folder that outputs go to."""
    name = (read_manifest(find_manifest_folder(folder)) or {}).get("name")
    return name if isinstance(name, str) and name == Path(name).name else ""


def _on_the_hub(
    hub_id: str,
    asked: RevisionedName,
    offline: bool,
    progress: Progress,
    warn: Callable[[str], object],
    patience: RetryPolicy,
) -> LocatedCheckpoint:
    from prepcli.remote.hub import download

    path = download(hub_id, asked.revision, offline, progress, warn, patience)
    kind = detect(path, hub_id)
    return LocatedCheckpoint(asked.name.rpartition("/")[2], path, kind, hub_id, path.name)


def _at_an_address(
    text: str, revision: str | None, offline: bool, afar: bool, patience: RetryPolicy
) -> LocatedCheckpoint:
    url = parse_url(text)
    if revision is not None:
        raise usage_error(f"`{text}` has no revision {revision}", "revisions belong to the hub")
    if offline:
        raise usage_error(f"`--offline` with `{text}`", "an object store is not here", "copy it to a folder here first")
    if not afar:
        raise usage_error(f"`{text}` is not here", "this command reads folders", "copy it to a folder here first")
    from prepcli.sources.bucket_folders import open_url

    remote = open_url(text, patience)
    kind = _kind_of(remote, text)
    last = (url.path or url.bucket).rpartition("/")[2]
    return LocatedCheckpoint(
        _manifest_name(remote.placeholder_folder) or last, remote.placeholder_folder, kind, remote=remote
    )


def _streamed(hub_id: str, asked: RevisionedName, offline: bool, patience: RetryPolicy) -> LocatedCheckpoint:
    from prepcli.remote.hub import open_remote

    commit, remote = open_remote(hub_id, asked.revision, offline, patience)
    kind = _kind_of(remote, hub_id)
    return LocatedCheckpoint(asked.name.rpartition("/")[2], remote.placeholder_folder, kind, hub_id, commit, remote)


def _kind_of(remote: RemoteCheckpoint, shown: str) -> Kind:
    """The kind of what stays where it is; PrepError for those that are only read when they are here."""
    from prepcli.remote.placeholders import rename_in_errors

    with rename_in_errors(remote.placeholder_folder, shown):
        kind = detect(remote.placeholder_folder, shown)
    if kind not in REMOTE_KINDS:
        why = f"it is a checkpoint of the kind {kind}; from afar prep reads {' and '.join(REMOTE_KINDS)}"
        raise PrepError(f"{shown} cannot be read from afar", why, "copy it to a folder here first")
    return kind


def _folders(cwd: Path) -> list[Path]:
    """Folders that a user may mean: hidden and unfinished ones are left out."""
    children = [child for child in sorted(cwd.iterdir()) if child.is_dir()]
    return [child for child in children if not child.name.startswith(".") and not child.name.endswith(PARTIAL_SUFFIX)]


def _no_such_path(text: str, reason: str, cwd: Path) -> PrepError:
    near = (cwd / os.path.expanduser(text)).parent
    where = "here" if near.resolve() == cwd.resolve() else f"in {near}"
    names = [child.name for child in _folders(near)] if near.is_dir() else []
    shown = ", ".join(names[:MAX_LISTED_FOLDERS]) + (" …" if len(names) > MAX_LISTED_FOLDERS else "")
    return usage_error(
        f"`{text}` does not exist",
        f"it looks like a path because it {reason}",
        f"folders {where}: {shown}" if names else "",
    )


def _unknown(text: str, cwd: Path) -> PrepError:
    meant = suggest(text, [*ALIASES_BY_NAME, *(child.name for child in _folders(cwd))])
    return usage_error(
        f"no checkpoint called `{text}`",
        "not a folder here, not an alias, and a hub id has the form owner/name",
        f"did you mean `{meant}`?" if meant else "`prep models` lists the aliases",
    )
