"""One path from the name of a checkpoint to its format and files: parse, list, detect, fetch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.formats.manifest import item_manifest_folder, read_manifest, read_manifest_of_file
from prepcli.formats.registry import FORMATS, Kind
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.detect import (
    Detected,
    detect,
    detect_file,
    detect_gguf,
    unused_quantization_note,
)
from prepcli.sources.open_folder import DEFAULT_ACCESS, Access, OpenFolder
from prepcli.sources.references import (
    CONFIG,
    BucketUrl,
    HubRepo,
    LocalPath,
    RunStep,
    parse_reference,
)
from prepcli.sources.source import read_config
from prepcli.stores.files import name_fault
from prepcli.stores.paths import AnyPath


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint of a known format, with the files to open it from.

    Attributes:
        display_name: Name of the checkpoint in messages.
        model_name: Name that outputs are called after, without a folder.
        kind: Format of the checkpoint.
        files: The files from which the checkpoint is opened.
        manifest: Manifest of an output of prep, else None.
        part: EasyLM part in the name, as `params` in `params::PATH`.
        access: How the checkpoint was accessed. Opening it gives notes to the same receiver.
        item: The Orbax item that the path is or holds, if any.
        may_be_quantized: Whether settings of a quantisation tool may be among the files.
        config: Content of the config.json in the folder of the files, if it was read to detect the format.
    """

    display_name: str
    model_name: str
    kind: Kind
    files: OpenFolder
    manifest: Manifest | None
    part: str = ""
    access: Access = DEFAULT_ACCESS
    item: AnyPath | None = None
    may_be_quantized: bool = True
    config: HFConfig | None = None

    @property
    def manifest_folder(self) -> AnyPath:
        """Folder of the manifest, if there is one: of the item, its step or export, or of the files."""
        if self.item is not None:
            return item_manifest_folder(self.item)
        path = self.files.path
        # `OUTPUT/flax_model.msgpack` given by its own path: its manifest is in the same folder.
        return path.parent if path.is_file() else path

    @property
    def config_in_folder(self) -> HFConfig:
        """Content of the config.json in the folder of the files, empty if there is none."""
        path = self.files.path / CONFIG
        return self.read_config(path) if path.is_file() else {}

    def read_config(self, path: AnyPath) -> HFConfig:
        """Return the content of a config.json. The one that detection has read is not read again."""
        if self.config is not None and path == self.files.path / CONFIG:
            return self.config
        return read_config(path)


def locate(
    name: str,
    revision: str | None = None,
    *,
    step: int | str | None = None,
    cwd: Path | None = None,
    access: Access = DEFAULT_ACCESS,
) -> LocatedCheckpoint:
    """Resolve the name of a checkpoint, detect its format, and fetch its headers or all of it.

    Args:
        name: A path, an object store URL, an alias or a hub id. See `parse_reference`.
        revision: Revision on the hub.
        step: Step of the training run `name`.
        cwd: Folder that relative paths start from. The working directory by default.
        access: How a remote checkpoint may be read.

    Raises:
        UsageError: The argument is not a known name or path.
        PrepError: The checkpoint does not exist, is not readable or has an unsupported format.
    """
    reference = parse_reference(name, revision, step=step, cwd=cwd)
    match reference:
        case LocalPath() | RunStep():
            folder = OpenFolder(reference.display_name, reference.path)
        case HubRepo() | BucketUrl():
            # Most checkpoints are on a disk, and need neither a client of the hub nor of object stores.
            from prepcli.sources.remote_folders import open_remote_folder

            folder = open_remote_folder(reference, access)
        case _:
            assert_never(reference)
    display_name = reference.display_name
    if isinstance(folder, OpenFolder) and folder.path.is_file():
        detected = Detected(detect_file(folder.path, display_name, allow_gguf=access.allow_gguf))
    elif isinstance(reference, HubRepo) and reference.file:
        kind = detect_gguf(reference.file, display_name, is_allowed=access.allow_gguf)
        detected = Detected(kind)
    else:
        detected = detect(
            folder,
            allow_adapters=access.allow_adapters,
            allow_quantized=access.allow_quantized,
        )
    # Only now, with a known and supported format, are files fetched: a refused model costs a listing.
    files = folder.fetch(detected.kind)
    item = None if detected.item is None else files.path / detected.item
    if files.path.is_file():
        manifest = read_manifest_of_file(files.path)
    else:
        manifest = read_manifest(files.path if item is None else item_manifest_folder(item))
    if FORMATS[detected.kind].is_hf_folder and detected.may_be_quantized:
        remark = unused_quantization_note(detected.config or {}, files.path)
        if remark:
            access.note(remark)
    model_name = reference.model_name
    # A model of the hub has the name of its repository, and a single file its own.
    if manifest is not None and not isinstance(reference, HubRepo) and not files.path.is_file():
        recorded_name: object = manifest.name
        # Outputs are called after it.
        if isinstance(recorded_name, str) and recorded_name and not name_fault(recorded_name):
            model_name = recorded_name
    return LocatedCheckpoint(
        display_name=display_name,
        model_name=model_name,
        kind=detected.kind,
        files=files,
        manifest=manifest,
        part=reference.part if isinstance(reference, LocalPath) else "",
        access=access,
        item=item,
        may_be_quantized=detected.may_be_quantized,
        config=detected.config,
    )


def check_stream(*located: LocatedCheckpoint) -> None:
    """Raise UsageError for `--stream` if every checkpoint is a local folder."""
    if all(not checkpoint.files.is_remote for checkpoint in located):
        names = " and ".join(checkpoint.model_name for checkpoint in located)
        option = Option("stream", True)
        raise usage_error(
            text("{} has no effect", option),
            f"{names} is read from a local folder",
            text("remove {}", option),
        )
