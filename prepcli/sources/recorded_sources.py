"""What records say about a checkpoint: its sources in its manifest, and its files and tensors in a lock.

The digests of a lock become digests of the source's tensors. Every reader compares its bytes with them, as with
the digests of a manifest. A lock therefore costs no further read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.errors import Command, Option, PrepError, text
from prepcli.core.formatting import join_names
from prepcli.core.json_values import quote_name
from prepcli.core.observer import Progress
from prepcli.formats.lock_file import Algorithms, Lock, LockedFile, LockedTensor
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    find_manifest_folder,
    read_manifest,
    saved_steps,
    step_folder,
)
from prepcli.planning.manifest_fields import Manifest, OriginRecord
from prepcli.sources.references import CONFIG, HubRepo, parse_reference
from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.addresses import is_url
from prepcli.stores.files import stat_file
from prepcli.stores.hub import SHA256, sha256_of_file
from prepcli.stores.paths import AnyPath, StorePath, path_in_folder

TRAIN = "train"
MERGE = "merge"
# It writes arrays of the caller, without a source.
SAVE_PARAMS = "save-params"
# A run in a folder of models is two levels deep, and its steps three.
MAX_SEARCH_DEPTH = 3
MAX_FOLDERS_ABOVE = 4
RowDigests = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class RecordedSource:
    """A source of an output, as the output's manifest records it.

    Attributes:
        name: Name as the user spelled it. Empty if it is not recorded.
        origin: Its identity. Empty in manifests of earlier versions.
        is_adapter: Whether it is the adapter of a merge. The other source of a merge is the base.
    """

    name: str
    origin: OriginRecord
    is_adapter: bool = False


def recorded_sources(manifest: Manifest) -> list[RecordedSource]:
    """Return the sources of a checkpoint. Empty for the first one of a chain: made without prep, or from arrays."""
    origin = manifest.origin
    if not manifest or manifest.command == SAVE_PARAMS or origin.get("is_random"):
        return []
    if manifest.command == TRAIN:
        return [RecordedSource(origin.get("name", ""), origin)]
    sources = [RecordedSource(manifest.source_name, origin)]
    merged = manifest.merged
    if merged is not None:
        identity: OriginRecord = {}
        if "manifest" in merged:
            identity["manifest"] = merged["manifest"]
        sources.append(RecordedSource(merged["adapter"], identity, is_adapter=True))
    return sources


def find_source(source: RecordedSource, output: AnyPath, search: Sequence[Path]) -> str | None:
    """Return the path of a source in the working directory, the folders above the output, or those to search.

    The checkpoint with the recorded manifest is taken, under any name. Without one it is the first with the recorded
    name.
    """
    recorded = source.origin.get("manifest")
    first: str | None = None
    for path in _candidates(source.name, output, search):
        if recorded is None or _read_manifest(path).digest == recorded:
            return str(path)
        first = first or str(path)
    if recorded is not None:
        for folder in search:
            for parent, folders, files in os.walk(folder):
                depth = len(Path(parent).relative_to(folder).parts)
                if depth == MAX_SEARCH_DEPTH:
                    folders.clear()
                if MANIFEST_FILE in files:
                    path = Path(parent)
                    if _read_manifest(path).digest == recorded:
                        return str(path)
    return first


def find_quantized_source(manifest: Manifest, output: AnyPath) -> tuple[str, Manifest]:
    """Find the quantised model of the decoded weights of an output.

    Outputs of outputs keep decoded weights, e.g. a resharded init. Their sources are followed to the first one without.

    Returns:
        The name or path of the model, and the manifest that records it as its source.
    """
    visited: set[AnyPath] = set()
    while True:
        sources = recorded_sources(manifest)
        if not sources or not sources[0].name or output in visited:
            raise PrepError(
                "the quantised model is unknown",
                f"the manifest of {output} does not name it",
                text("{} names it", Option("quantized_source", "SOURCE")),
            )
        visited.add(output)
        name = sources[0].name
        found = None if is_url(name) else find_source(sources[0], output, ())
        if found is None:
            return name, manifest
        next_manifest = _read_manifest(Path(found))
        if not next_manifest.quantized:
            return found, manifest
        manifest, output = next_manifest, Path(found)


def _candidates(name: str, output: AnyPath, search: Sequence[Path]) -> Iterator[Path]:
    """Yield existing checkpoints of a name. A run is replaced by its steps, the last one first."""
    if not name:
        return
    relative = Path(os.path.expanduser(name))
    # `tiny-init` of `PROJECT/runs/NAME/20` is in the third folder above, of an export of the run in the fourth.
    near: list[Path] = []
    if isinstance(output, Path):
        near = list(output.absolute().parents)[:MAX_FOLDERS_ABOVE]
    places = [folder / relative for folder in (Path(), *near, *search)]
    places += [folder / relative.name for folder in search]
    for place in places:
        if not os.path.exists(place):
            continue
        steps = saved_steps(place)
        for step in reversed(steps):
            yield step_folder(place, step)
        if not steps:
            yield place


def _read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. NO_MANIFEST without one, or if it is damaged."""
    folder = path.parent if path.is_file() else find_manifest_folder(path)
    try:
        return read_manifest(folder) or NO_MANIFEST
    except PrepError:
        return NO_MANIFEST


def make_lock(
    source: Source,
    *,
    name: str,
    revision: str | None,
    algorithm: str,
    digests: Mapping[str, RowDigests],
    progress: Progress,
) -> Lock:
    """Return the lock of a source, given the algorithm of the digests of its tensors."""
    weights = {_name_in_checkpoint(source, path): path for path in source.files}
    paths = {**settings_files(source), **weights}
    sizes = {name: stat_file(path).st_size for name, path in paths.items()}
    published = _published_digests(source)
    files: dict[str, LockedFile] = {}
    progress.begin("lock files", sum(sizes.values()))
    try:
        for file, path in sorted(paths.items()):
            digest = published[file] if file in published else sha256_of_file(path)
            files[file] = LockedFile(bytes=sizes[file], digest=digest)
            progress.advance(sizes[file])
    finally:
        progress.end()
    tensors: dict[str, LockedTensor] = {}
    names = _stored_names(source)
    for tensor in source.all_tensors:
        tensors[names[tensor.name]] = LockedTensor(
            dtype=tensor.dtype, shape=tensor.shape, digests=digests[tensor.name]
        )
    return Lock(
        source=name,
        revision=revision,
        algorithms=Algorithms(tensors=algorithm),
        files=files,
        tensors=tensors,
    )


def apply_lock(
    source: Source, lock: Lock, lock_name: str, revision: str | None, *, is_mapped: bool = False
) -> Source:
    """Check the files and headers of a source against a lock, and return the source with the digests of the lock.

    Decoded weights, such as fp8 to bfloat16, have other names and bytes than their files. So have the tensors of a
    user's map. Their files are read and compared here, before they are read a second time.

    Args:
        source: The opened checkpoint.
        lock: Content of the lock file.
        lock_name: Name of the lock file, for the error.
        revision: Commit of the source on the hub.
        is_mapped: Whether a user's map has made the tensors of the source.
    """
    has_other_tensors = is_mapped or bool(source.quantization)
    differences: list[str] = []
    if lock.revision is not None and revision is not None and revision != lock.revision:
        differences.append(f"its commit is {revision}, the lock has {lock.revision}")
    differences += _file_differences(source, lock, hashes_weights=has_other_tensors)
    if not has_other_tensors:
        names = _stored_names(source)
        tensors = {names[tensor.name]: tensor for tensor in source.all_tensors}
        for name in sorted({*tensors, *lock.tensors}):
            label = f"tensor {quote_name(name)}"
            tensor = tensors.get(name)
            locked = lock.tensors.get(name)
            if tensor is None:
                differences.append(f"{label} is missing")
            elif locked is None:
                differences.append(f"{label} is not in the lock")
            elif (tensor.dtype, tensor.shape) != (locked.dtype, locked.shape):
                present = f"{tensor.dtype} {list(tensor.shape)}"
                differences.append(
                    f"{label} is {present}, the lock has {locked.dtype} {list(locked.shape)}"
                )
            elif tensor.digests and tensor.digests != locked.digests:
                differences.append(f"{label} has other digests in {MANIFEST_FILE} than in the lock")
    if differences:
        raise PrepError(
            f"{source.display_name} differs from {lock_name}",
            join_names(differences, separator="; "),
            text(
                "get the locked files again; {} approves the present ones",
                Command("lock", source.display_name),
            ),
        )
    if has_other_tensors:
        return replace(source, is_locked=True)
    return replace(
        source,
        tensors=_with_digests(source, source.tensors, lock),
        tower_tensors=_with_digests(source, source.tower_tensors, lock),
        state_tensors=_with_digests(source, source.state_tensors, lock),
        is_locked=True,
    )


def pinned_revision(checkpoint: str, revision: str | None, lock: Lock) -> str | None:
    """Return the revision to read: the requested one, else for a model of the hub the commit of the lock."""
    if revision is None and isinstance(parse_reference(checkpoint), HubRepo):
        return lock.revision
    return revision


def _with_digests(
    source: Source, tensors: tuple[SourceTensor, ...], lock: Lock
) -> tuple[SourceTensor, ...]:
    """Return tensors with the digests of the lock, unless a manifest has recorded equal ones."""
    names = _stored_names(source)
    locked: list[SourceTensor] = []
    for tensor in tensors:
        digests = tensor.digests or lock.tensors[names[tensor.name]].digests
        locked.append(replace(tensor, digests=digests))
    return tuple(locked)


def _file_differences(source: Source, lock: Lock, *, hashes_weights: bool) -> Iterator[str]:
    """Yield a text for each file with another size or digest, and for each missing or additional file."""
    settings = settings_files(source)
    weights = {_name_in_checkpoint(source, path): path for path in source.files}
    paths = {**settings, **weights}
    sizes = {name: stat_file(path).st_size for name, path in paths.items()}
    published = _published_digests(source)
    for name in sorted({*paths, *lock.files}):
        label = quote_name(name)
        locked = lock.files.get(name)
        if name not in paths:
            yield f"{label} is missing"
        elif locked is None:
            yield f"{label} is not in the lock"
        elif locked.bytes != sizes[name]:
            yield f"{label} has {sizes[name]:,} bytes, the lock has {locked.bytes:,}"
        # The digests of the tensors cover the weights of all other sources.
        elif name in settings or hashes_weights:
            digest = published[name] if name in published else sha256_of_file(paths[name])
            if digest is None:
                yield f"{label} has no SHA-256 to compare, and its decoded or mapped tensors are not in the lock"
            elif digest != locked.digest:
                yield f"{label} has the SHA-256 {digest}, the lock has {locked.digest}"


def _stored_names(source: Source) -> dict[str, str]:
    """Return the name of each tensor in the files of a source, by its name in `source.all_tensors`."""
    names = source.display_names()
    for tensor in (*source.tensors, *source.tower_tensors):
        names[tensor.name] = source.names.wrapper_prefix + source.stored_name(tensor)
    return names


def settings_files(source: Source) -> dict[str, AnyPath]:
    """Return the config, the tokenizer and the other small files of a source, by name in the lock."""
    paths = [file.path for file in source.side_files]
    # A decoded or a truncated model has another config than its file, which the lock covers all the same.
    config_path = source.config_path or source.folder / CONFIG
    if config_path.is_file():
        paths.append(config_path)
    if source.manifest is not None:
        paths.append(source.folder / MANIFEST_FILE)
    return {_name_in_checkpoint(source, path): path for path in paths}


def _published_digests(source: Source) -> dict[str, str | None]:
    """Return the SHA-256 of each weight file on a server, or None if the server publishes none."""
    digests: dict[str, str | None] = {}
    for path in source.files:
        if not isinstance(path, StorePath):
            continue
        digest = path.file.digest
        is_sha256 = digest.startswith(SHA256)
        digests[_name_in_checkpoint(source, path)] = (
            digest.removeprefix(SHA256) if is_sha256 else None
        )
    return digests


def _name_in_checkpoint(source: Source, path: AnyPath) -> str:
    """Return the path of a file within its checkpoint, or its name if it is elsewhere, e.g. a config of the user."""
    inside = path_in_folder(path, source.folder)
    return path.name if inside is None else inside.as_posix()
