"""Resolution of a checkpoint argument: a path, else an object store URL, else an alias, else a hub id."""

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
REMOTE_KINDS = ("safetensors", "orbax")  # kinds that store tensors unencoded, so that byte ranges can be read remotely
MAX_LISTED_FOLDERS = 8

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_PATH_STARTS = ("./", "../", "/", "~")


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint argument, resolved.

    Attributes:
        model_name: Name that outputs are called after, without a folder.
        path: Folder or file of the checkpoint; a folder of placeholder files if `remote` is set.
        kind: Format of the checkpoint.
        hub_id: `OWNER/NAME`, for a checkpoint of the hub.
        revision: Commit on the hub.
        remote: The files, if the checkpoint is read remotely.
        part: EasyLM part in the argument, as `params` in `params::PATH`.
    """

    model_name: str
    path: Path
    kind: Kind
    hub_id: str | None = None
    revision: str | None = None
    remote: RemoteCheckpoint | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class RevisionedName:
    """An alias or hub id, and the requested revision."""

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
    """Resolve a checkpoint argument; download a checkpoint of the hub unless it is to be streamed.

    Args:
        checkpoint: A folder, an object store URL, an alias or a hub id, tried in this order. An alias or hub id may be
            followed by `@REVISION`.
        revision: Revision on the hub.
        offline: Use only local files and the cache.
        cwd: Folder that relative paths start from; the working directory by default.
        progress: Receives the progress of a download.
        warn: Called with a warning if the hub is unreachable and a cached model is used.
        stream: Do not download a checkpoint of the hub; set `remote` in the result.
        allow_remote: Accept object store URLs; the caller reads tensors from `remote`.
        retry_policy: Time-out and retries of each request.

    Raises:
        PrepError: The argument is no known name or path (usage), or the checkpoint does not exist, is not readable or
            has an unsupported format.
    """
    cwd = cwd or Path()
    part, path = split_part(checkpoint)
    folder = cwd / os.path.expanduser(path)
    if path and os.path.exists(folder):  # Path.exists raises for some texts, os.path.exists returns False
        if revision is not None:
            raise usage_error(
                f"`{checkpoint}` is a folder and has no revision {revision}", "only models on the hub have revisions"
            )
        return replace(_locate_folder(folder, checkpoint), part=part)
    if is_url(checkpoint):
        return _locate_url(
            checkpoint, revision=revision, offline=offline, allow_remote=allow_remote, retry_policy=retry_policy
        )
    if part:
        raise _missing_path_error(path, f"follows `{part}::`", cwd)
    requested = _split_revision(checkpoint, revision)
    if reason := _path_reason(requested.name):
        raise _missing_path_error(requested.name, reason, cwd)
    alias = ALIASES_BY_NAME.get(requested.name)
    hub_id = alias.hub_id if alias is not None else requested.name
    if not _HUB_ID.fullmatch(hub_id):
        raise _unknown_name_error(requested.name, cwd)
    if stream:
        return _locate_streamed(hub_id, requested, offline, retry_policy)
    return _locate_on_hub(
        hub_id,
        requested,
        offline=offline,
        progress=progress or NullProgress(),
        warn=warn,
        retry_policy=retry_policy,
    )


def default_checkpoint(cwd: Path, accept: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return the only folder in `cwd` that prep wrote and that `accept` accepts.

    Raises:
        PrepError: There is none, or more than one (usage).
    """
    candidates = sorted(folder for folder in _visible_folders(cwd) if _has_manifest(folder) and accept(folder))
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise usage_error(
            "no checkpoint was named", f"no folder here holds a {MANIFEST_FILE}", "name a folder, alias or hub id"
        )
    names = ", ".join(f"./{path.name}" for path in candidates)
    raise usage_error("no checkpoint was named", f"{len(candidates)} folders here could be meant", f"one of: {names}")


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder, or a step in a run folder, has a manifest."""
    try:
        steps = (child for child in folder.iterdir() if child.name.isdecimal())
        return (folder / MANIFEST_FILE).is_file() or any((step / MANIFEST_FILE).is_file() for step in steps)
    except OSError:
        return False


def _split_revision(name: str, revision: str | None) -> RevisionedName:
    """Split `NAME@REVISION`; raise PrepError if it contradicts `--revision`."""
    bare_name, separator, suffix = name.rpartition("@")
    if not separator or not bare_name:
        return RevisionedName(name, revision)
    if not suffix or revision not in (None, suffix):
        why = f"`@{suffix}` and `--revision {revision}`" if suffix else "nothing follows the @"
        raise usage_error(f"`{name}` names no single revision", why, f"`{bare_name}@{revision or 'main'}`")
    return RevisionedName(bare_name, suffix)


def _path_reason(text: str) -> str:
    """Return why a text must be a path; an empty string if it may be a name."""
    start = next((start for start in _PATH_STARTS if text.startswith(start)), None)
    if start is not None:
        return f"begins with `{start}`"
    if text in (".", ".."):
        return f"is `{text}`"
    if text.endswith("/"):
        return "ends with `/`"
    return "has more than one `/`" if text.count("/") > 1 else ""


def _locate_folder(folder: Path, display_name: str) -> LocatedCheckpoint:
    kind = detect(folder, display_name)
    return LocatedCheckpoint(_manifest_name(folder) or Path(os.path.abspath(folder)).name, folder, kind)


def _manifest_name(folder: Path) -> str:
    """Return the model name in the manifest; empty if it has a slash, which would leave the output folder."""
    name = (read_manifest(find_manifest_folder(folder)) or {}).get("name")
    return name if isinstance(name, str) and name == Path(name).name else ""


def _locate_on_hub(
    hub_id: str,
    requested: RevisionedName,
    *,
    offline: bool,
    progress: Progress,
    warn: Callable[[str], object],
    retry_policy: RetryPolicy,
) -> LocatedCheckpoint:
    from prepcli.remote.hub import download

    path = download(hub_id, requested.revision, offline, progress, warn, retry_policy)
    kind = detect(path, hub_id)
    return LocatedCheckpoint(requested.name.rpartition("/")[2], path, kind, hub_id, path.name)


def _locate_url(
    url_text: str, *, revision: str | None, offline: bool, allow_remote: bool, retry_policy: RetryPolicy
) -> LocatedCheckpoint:
    url = parse_url(url_text)
    if revision is not None:
        raise usage_error(f"`{url_text}` has no revision {revision}", "only models on the hub have revisions")
    if offline:
        raise usage_error(
            f"`--offline` with `{url_text}`", "an object store needs the network", "copy it to a local folder first"
        )
    if not allow_remote:
        raise usage_error(
            f"`{url_text}` is a URL", "this command reads local folders", "copy it to a local folder first"
        )
    from prepcli.sources.bucket_folders import open_url

    remote = open_url(url_text, retry_policy)
    kind = _detect_remote(remote, url_text)
    last_part = (url.path or url.bucket).rpartition("/")[2]
    model_name = _manifest_name(remote.placeholder_folder) or last_part
    return LocatedCheckpoint(model_name, remote.placeholder_folder, kind, remote=remote)


def _locate_streamed(
    hub_id: str, requested: RevisionedName, offline: bool, retry_policy: RetryPolicy
) -> LocatedCheckpoint:
    from prepcli.remote.hub import open_remote

    commit, remote = open_remote(hub_id, requested.revision, offline, retry_policy)
    kind = _detect_remote(remote, hub_id)
    return LocatedCheckpoint(
        model_name=requested.name.rpartition("/")[2],
        path=remote.placeholder_folder,
        kind=kind,
        hub_id=hub_id,
        revision=commit,
        remote=remote,
    )


def _detect_remote(remote: RemoteCheckpoint, display_name: str) -> Kind:
    """Return the kind of a remote checkpoint; raise PrepError if it can only be read locally."""
    from prepcli.remote.placeholders import rename_in_errors

    with rename_in_errors(remote.placeholder_folder, display_name):
        kind = detect(remote.placeholder_folder, display_name)
    if kind not in REMOTE_KINDS:
        why = f"its format is {kind}; only {' and '.join(REMOTE_KINDS)} are read remotely"
        raise PrepError(f"{display_name} cannot be read remotely", why, "copy it to a local folder first")
    return kind


def _visible_folders(cwd: Path) -> list[Path]:
    """List the folders, except hidden ones and partial outputs."""
    children = [child for child in sorted(cwd.iterdir()) if child.is_dir()]
    return [child for child in children if not child.name.startswith(".") and not child.name.endswith(PARTIAL_SUFFIX)]


def _missing_path_error(path: str, reason: str, cwd: Path) -> PrepError:
    parent = (cwd / os.path.expanduser(path)).parent
    where = "here" if parent.resolve() == cwd.resolve() else f"in {parent}"
    names = [folder.name for folder in _visible_folders(parent)] if parent.is_dir() else []
    listed = ", ".join(names[:MAX_LISTED_FOLDERS]) + (" …" if len(names) > MAX_LISTED_FOLDERS else "")
    return usage_error(
        f"`{path}` does not exist",
        f"it looks like a path because it {reason}",
        f"folders {where}: {listed}" if names else "",
    )


def _unknown_name_error(name: str, cwd: Path) -> PrepError:
    suggestion = suggest(name, [*ALIASES_BY_NAME, *(folder.name for folder in _visible_folders(cwd))])
    return usage_error(
        f"no checkpoint called `{name}`",
        "not a folder here, not an alias, and a hub id has the form owner/name",
        f"did you mean `{suggestion}`?" if suggestion else "`prep models` lists the aliases",
    )
