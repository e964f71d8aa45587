"""The checkpoint for the map of `prep verify`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prepcli.commands.operations.opening import CommonOptions
from prepcli.core.errors import Option, text, usage_error
from prepcli.formats.manifest import MANIFEST_FILE, find_manifest_folder, read_manifest
from prepcli.planning.manifest_fields import Manifest


def is_output(checkpoint: str | None) -> bool:
    """Return whether prep wrote a local checkpoint."""
    if checkpoint is None or "://" in checkpoint:
        return False
    path = Path(checkpoint).expanduser()
    return path.exists() and (find_manifest_folder(path) / MANIFEST_FILE).exists()


def first_options(common: CommonOptions, against: str | None) -> CommonOptions:
    """Return the options of the first checkpoint of a comparison.

    A map is for the second checkpoint, or for the first one if prep wrote the second one.

    Args:
        common: Options of the comparison.
        against: The second checkpoint. None to compare with the manifest.

    Raises:
        UsageError: There is a map, and no second checkpoint.
    """
    if common.tensor_map is None:
        return common
    if against is not None and is_output(against):
        return mapped_options(
            common, read_manifest(find_manifest_folder(Path(against).expanduser()))
        )
    if against is None:
        option = Option("map")
        what = text("{} requires a second checkpoint", option)
        why = "the digests of an output are those of the mapped tensors"
        raise usage_error(what, why, text("remove {}, or name the second checkpoint", option))
    return replace(common, tensor_map=None)


def mapped_options(common: CommonOptions, output: Manifest | None) -> CommonOptions:
    """Return the options of a checkpoint with a map: its weights are decoded if those of the output were.

    Args:
        common: Options of the checkpoint.
        output: Manifest of the other checkpoint, if prep wrote it.
    """
    if common.tensor_map is not None and output is not None and output.quantization:
        return replace(common, quantized="decode")
    return common
