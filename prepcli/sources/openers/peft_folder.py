"""Opener for an adapter in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from prepcli.core.errors import DamagedError, PrepError
from prepcli.core.json_values import HFConfig
from prepcli.formats.manifest import MANIFEST_FILE, check_header, read_manifest
from prepcli.formats.model_files import FileHeader
from prepcli.formats.safetensors import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_HINT,
    read_adapter_files,
)
from prepcli.models.parameters import Family, WeightTying
from prepcli.planning.manifest_fields import Manifest, TensorRecord
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.openers.hf_folder import file_tensors
from prepcli.sources.references import SourceHints
from prepcli.sources.source import Source, file_stamps
from prepcli.sources.tensor_match import TensorNames
from prepcli.stores.paths import AnyPath

NO_RECORD: TensorRecord = {"digests": []}
DAMAGE_HINT = f"get or export the adapter again; without its {MANIFEST_FILE} it is not checked"


def is_adapter(path: AnyPath) -> bool:
    """Return whether a folder has an adapter of PEFT."""
    return (path / ADAPTER_CONFIG).is_file()


def read_checked_header(path: AnyPath) -> tuple[FileHeader, Manifest | None]:
    """Read the header of an adapter's tensors, and compare it with the manifest if prep wrote the adapter.

    Returns:
        The header, and the manifest. None if PEFT wrote the adapter.

    Raises:
        PrepError: A file is missing or broken, or the header differs from the manifest.
    """
    (header,) = read_adapter_files(path).headers
    manifest = read_manifest(path)
    if manifest is not None:
        check_header(path / ADAPTER_FILE, manifest, header.digest)
        for tensor in header.tensors:
            record = manifest.tensors.get(tensor.name, NO_RECORD)
            recorded = record.get("dtype"), record.get("shape")
            if recorded != (tensor.dtype, list(tensor.shape)):
                stored = f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}"
                expected = f"{record.get('dtype')!s:.60} {record.get('shape')!s:.60}"
                if record is NO_RECORD:
                    expected = "no such tensor"
                why = f"{ADAPTER_FILE} has {stored}, {MANIFEST_FILE} records {expected}"
                raise DamagedError(f"{path} is damaged", why, DAMAGE_HINT)
            num_rows = tensor.shape[0] if tensor.shape else 1
            if [digest[:2] for digest in record["digests"]] != [[0, num_rows]]:
                why = f"{MANIFEST_FILE} has no digest of all rows of {tensor.name}"
                raise DamagedError(f"{path} is damaged", why, DAMAGE_HINT)
        # A tensor that was removed from the file has no digest left to compare, so the names are
        # compared in both directions.
        missing = sorted(manifest.tensors.keys() - {tensor.name for tensor in header.tensors})
        if missing:
            raise DamagedError(
                f"{path} is damaged", f"{ADAPTER_FILE} has no {missing[0]:.200}", DAMAGE_HINT
            )
    return header, manifest


def open_adapter(path: AnyPath, family: Family, config: HFConfig) -> Source:
    """Read the header of an adapter, and the digests of its tensors if prep wrote it.

    Returns:
        A source with the tensors of the adapter. They are not compared with the family's parameters.

    Raises:
        PrepError: A file is missing or broken, or the header differs from the manifest.
    """
    header, manifest = read_checked_header(path)
    names = TensorNames(family)
    return Source(
        display_name=str(path),
        root=path,
        family=family,
        config=config,
        names=names,
        tensors=file_tensors(header.tensors, names, manifest),
        files=(path / header.file_name,),
        file_stamps=file_stamps([header]),
        small_files=(),
        manifest=manifest,
    )


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the header of an adapter without its base. See `open_adapter`, which also reads the manifest."""
    del hints  # the config of the base is not needed
    source = open_adapter(located.files.path, ADAPTER_FAMILY, {})
    return replace(source, display_name=located.display_name)


def _no_model(config: HFConfig) -> NoReturn:
    raise PrepError("an adapter is not a model", "it has no config.json", ADAPTER_HINT)


# Family of an adapter without its base model. Its tensors keep their names in the file.
ADAPTER_FAMILY = Family(
    name="adapter",
    prefix="",
    unprefixed=(),
    sizes=_no_model,
    parameters={},
    dropped={},
    tying=WeightTying(head_leaf="", head_tensor="", embedding_tensor="", tied_by_default=False),
    arch_config=_no_model,
)
