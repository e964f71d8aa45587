"""Record the new digest of a settings or tokenizer file of an output changed on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.commands.operations.verification_results import AcceptedChange, OldAndNew
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.observer import Observer
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    STATE_ITEM,
    encode_manifest,
    find_manifest_folder,
    is_settings_file,
    manifest_digest,
    parse_manifest,
    record_file,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.references import CONFIG, LocalPath, RunStep, parse_reference
from prepcli.sources.source import HF_FOLDER, read_config
from prepcli.stores.files import io_error, read_small_file, write_file

# Path of the config in a Hugging Face folder, in an init and in a training step.
MODEL_CONFIGS = (
    CONFIG,
    f"{HF_FOLDER}/{CONFIG}",
    f"{STATE_ITEM}/{HF_FOLDER}/{CONFIG}",
)
MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class AcceptedFiles:
    """New records of changed files, not written yet.

    Attributes:
        folder: Folder of the manifest.
        data: Bytes of the manifest with the new records.
        changes: The name of each file with its old and new size and digest, and the changed keys of a config.
    """

    folder: Path
    data: bytes
    changes: list[AcceptedChange]

    def write(self, observer: Observer) -> None:
        """Write the manifest, and note each change. Raise PrepError if it cannot be written."""
        path = self.folder / MANIFEST_FILE
        try:
            write_file(path, self.data)
        except OSError as error:
            raise io_error(path, error) from error
        for change in self.changes:
            observer.note(_describe_change(change))


def accept_files(checkpoint: str, files: Sequence[str]) -> AcceptedFiles:
    """Return a copy of an output's manifest with the current size and digest of the given files.

    The record of a removed file is deleted. A changed config.json replaces `config` in the manifest.

    Raises:
        UsageError: The checkpoint is not a local output that records its files, or it lists no such file.
        PrepError: A file cannot be read.
    """
    folder = _output_folder(checkpoint)
    stored = parse_manifest(folder / MANIFEST_FILE, read_small_file(folder / MANIFEST_FILE))
    if "files" not in stored:
        why = (
            "it was written by an earlier version of prep, which recorded no digests of small files"
        )
        what = text("{} has no effect for {}", Option("accept"), checkpoint)
        raise usage_error(what, why, text("remove {}", Option("accept")))
    names = [_recorded_name(folder, stored, file) for file in files]
    # A copy, because its records change.
    manifest = {**stored, "files": dict(stored.files)}
    changes = [_accept_file(folder, manifest, name) for name in dict.fromkeys(names)]
    return AcceptedFiles(folder, encode_manifest(manifest), changes)


def _output_folder(checkpoint: str) -> Path:
    """Return the folder with the manifest of a local output."""
    reference = parse_reference(checkpoint)
    if not isinstance(reference, LocalPath | RunStep):
        what = text("{} needs a local output, not {}", Option("accept"), checkpoint)
        raise usage_error(what, "it changes the manifest", "name a folder")
    folder = find_manifest_folder(reference.path)
    if not (folder / MANIFEST_FILE).is_file():
        what = text("{} has no effect for {}", Option("accept"), checkpoint)
        why = f"it has no {MANIFEST_FILE}"
        raise usage_error(what, why, text("remove {}", Option("accept")))
    return folder


def _recorded_name(folder: Path, manifest: Manifest, file: str) -> str:
    """Return the recorded name of a settings file, given by its path or by the end of it."""
    # Without files of tensors and metadata of an Orbax item
    names = [MANIFEST_FILE]
    names += [n for n, record in manifest.files.items() if "xxh3" in record and is_settings_file(n)]
    path = Path(file).absolute()
    if path.is_relative_to(folder.absolute()):
        file = path.relative_to(folder.absolute()).as_posix()
    if file in names:
        return file
    # With the slash, `config.json` matches `hf/config.json` but not `generation_config.json`.
    candidates = [name for name in names if f"/{name}".endswith(f"/{file}")]
    hint = text("{} with one of these names", Option("accept"))
    if not candidates:
        why = f"its settings and tokenizer files are {join_names(names[1:], max_names=MAX_SHOWN)}"
        raise usage_error(f"{folder} records no file `{file}`", why, hint)
    if len(candidates) > 1:
        why = f"they are {join_names(candidates, max_names=MAX_SHOWN)}"
        raise usage_error(f"`{file}` is the name of several files of {folder}", why, hint)
    return candidates[0]


def _accept_file(folder: Path, manifest: dict[str, Any], name: str) -> AcceptedChange:
    """Change the record of one file, and return the changes."""
    # The user edited the manifest itself. `encode_manifest` computes its digest again.
    if name == MANIFEST_FILE:
        old_digest = manifest["digest"]
        new_digest = manifest_digest(manifest)
        return {"file": name, "xxh3": {"old": old_digest, "new": new_digest}}
    records = manifest["files"]
    old = records[name]
    if not (folder / name).exists():
        del records[name]
        return {
            "file": name,
            "bytes": {"old": old["bytes"], "new": None},
            "xxh3": {"old": old["xxh3"], "new": None},
        }
    new = record_file(folder / name)
    records[name] = new
    sizes: OldAndNew = {"old": old["bytes"], "new": new["bytes"]}
    digests: OldAndNew = {"old": old["xxh3"], "new": new.get("xxh3")}
    if name not in MODEL_CONFIGS:
        return {"file": name, "bytes": sizes, "xxh3": digests}
    config = read_config(folder / name)
    recorded = manifest["config"]
    # A key with the value None differs from an absent key.
    missing = object()
    keys = [
        key
        for key in {*recorded, *config}
        if recorded.get(key, missing) != config.get(key, missing)
    ]
    manifest["config"] = config
    return {"file": name, "keys": sorted(keys), "bytes": sizes, "xxh3": digests}


def _describe_change(change: AcceptedChange) -> str:
    """Describe an accepted file: `accepted hf/config.json: 612 -> 613 bytes, xxh3 1c… -> 8f…; changed: rope_theta`."""
    name = change["file"]
    digests = change["xxh3"]
    sizes = change.get("bytes")
    if digests["new"] is None:
        return f"accepted {name}: it was removed, and is no longer recorded"
    if digests["old"] == digests["new"]:
        return f"accepted {name}: it is unchanged"
    size = f"{sizes['old']:,} -> {sizes['new']:,} bytes, " if sizes else ""
    keys = change.get("keys", ())
    suffix = f"; changed: {join_names(keys, max_names=MAX_SHOWN)}" if keys else ""
    return f"accepted {name}: {size}xxh3 {digests['old']:.32} -> {digests['new']}{suffix}"
