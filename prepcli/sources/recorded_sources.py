"""Find the sources of an output by the names and digests in its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, find_manifest_folder, read_manifest
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.planning.manifest_fields import Manifest, OriginRecord
from prepcli.stores.object_url import is_url
from prepcli.stores.paths import AnyPath

TRAIN = "train"
MERGE = "merge"
# It writes arrays of the caller, without a source.
SAVE_PARAMS = "save-params"
# A run in a folder of models is two levels deep, and its steps three.
MAX_SEARCH_DEPTH = 3
MAX_FOLDERS_ABOVE = 4


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
        if recorded is None or _manifest_digest(path) == recorded:
            return str(path)
        first = first or str(path)
    if recorded is not None:
        for path in _outputs_below(search):
            if _manifest_digest(path) == recorded:
                return str(path)
    return first


def find_quantized_source(manifest: Manifest, output: AnyPath) -> tuple[str, Manifest]:
    """Find the quantised model that the decoded weights of an output come from.

    Outputs of outputs keep decoded weights, e.g. a resharded init. Their sources are followed to the first one without.

    Args:
        manifest: Manifest of the output.
        output: Its folder.

    Returns:
        The name or path of the model, and the manifest that records it as its source.

    Raises:
        PrepError: A manifest records no source.
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


def _outputs_below(search: Sequence[Path]) -> Iterator[Path]:
    """Yield the outputs of prep in the folders to search."""
    for folder in search:
        for parent, folders, files in os.walk(folder):
            depth = len(Path(parent).relative_to(folder).parts)
            if depth == MAX_SEARCH_DEPTH:
                folders.clear()
            if MANIFEST_FILE in files:
                yield Path(parent)


def _manifest_digest(path: Path) -> str | None:
    """Return the digest of the manifest of a checkpoint. None without a manifest, or if it is damaged."""
    return _read_manifest(path).digest


def _read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. NO_MANIFEST without one, or if it is damaged."""
    folder = path.parent if path.is_file() else find_manifest_folder(path)
    try:
        return read_manifest(folder) or NO_MANIFEST
    except PrepError:
        return NO_MANIFEST
