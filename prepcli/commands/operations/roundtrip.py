"""Convert a model to every layout and back, and certify that no bit changed."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np

from prepcli.commands.operations.checkpoint_options import (
    check_output_location,
    check_result_path,
    common_options,
    open_checkpoint,
    write_result,
)
from prepcli.commands.operations.compared_settings import (
    MADE_FILES,
    file_digests,
    recorded_file_digests,
)
from prepcli.commands.operations.export import export
from prepcli.commands.operations.inspection_options import RoundtripOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.commands.operations.pad_vocab import pad_vocab
from prepcli.commands.operations.results import Conversion, Roundtrip, RoundtripWay
from prepcli.commands.operations.save_init import reshard, save_init
from prepcli.commands.operations.verify import verify
from prepcli.core import version
from prepcli.core.errors import (
    TERMINAL,
    DamagedError,
    Option,
    PrepError,
    causes,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text, did_you_mean, join_names
from prepcli.core.observer import Observer, Progress, SilentCommandObserver, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.engine.digest import record_digest_of_pieces
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from prepcli.planning.libraries import TREES
from prepcli.sources.locate import check_stream
from prepcli.sources.source import Source
from prepcli.stores.files import io_error

CERTIFICATE_SUFFIX = ".roundtrip.json"
FORMAT_VERSION = 1
MAX_DIFFERENCES = 5

# A conversion: its command, and the options of the Python function.
_Step = tuple[str, Mapping[str, Any]]

CONVERSIONS: dict[str, Callable[..., Conversion]] = {
    "pad-vocab": pad_vocab,
    "save-init": save_init,
    "reshard": reshard,
    "export": export,
}
INIT: _Step = ("save-init", {})
EXPORT: _Step = ("export", {})
VERBATIM_WAY = "verbatim"
# The steps from a model to a Hugging Face folder, by the name of the way.
WAYS: dict[str, tuple[_Step, ...]] = {
    "init": (INIT, EXPORT),
    "no-scan": (("save-init", {"scan": False}), EXPORT),
    "scan-axis": (("save-init", {"scan_axis": 1}), EXPORT),
    "mesh": (
        # Both meshes split the vocabulary by 2.
        ("save-init", {"mesh": "1,2,2", "pad_vocab": "auto"}),
        ("reshard", {"mesh": "1,1,2", "scan": False}),
        EXPORT,
    ),
    "compress": (("save-init", {"compress": "zstd"}), EXPORT),
    "pad": (("pad-vocab", {"multiple": 128}), INIT, EXPORT),
    VERBATIM_WAY: (("save-init", {"verbatim": True}), EXPORT),
    **{tree: (("export", {"layout": tree}), INIT, EXPORT) for tree in TREES},
    "dcp": (("export", {"format": "dcp"}), INIT, EXPORT),
    "files": (("save-init", {"storage": "files"}), EXPORT),
    "zarr3": (("save-init", {"storage": "zarr3"}), EXPORT),
    "zarr3-files": (("save-init", {"storage": "zarr3-files"}), EXPORT),
}


@public
def roundtrip(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[RoundtripOptions],
) -> Roundtrip:
    """Convert a model to every layout and back to a Hugging Face folder, and certify that no bit changed.

    The conversions are written to a temporary folder next to the certificate, one way after another. `verify` compares
    each end with the model.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: The certificate. Default: the model's name and `.roundtrip.json`, in the working directory.
        progress: Receives the bytes of each conversion. Default: none. See `Progress`.
        **options: See `RoundtripOptions`.

    Returns:
        Tensors, bytes and digest of each way. A difference is not an exception: the result is False in a condition.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: The certificate exists with other content.
        PrepError: The model cannot be read, no way is available, or a conversion failed.

    Example:
        certificate = prep.roundtrip("gpt-neo-1.3B", layout=["init", "easylm"])
        print([way.digest for way in certificate.ways])
    """
    started_s = time.monotonic()
    names = list(dict.fromkeys(options["layout"])) or list(WAYS)
    for name in names:
        if name not in WAYS:
            known = join_names(list(WAYS), max_names=len(WAYS))
            what = text("{} is unknown", Option("layout", name))
            raise usage_error(what, f"the ways are {known}", did_you_mean(name, list(WAYS)))
    observer = observer_of(progress)
    common = replace(common_options(checkpoint, None, options), verbatim=None)
    located, source = open_checkpoint(common, observer)
    if common.stream:
        check_stream(located)
    path = Path(out or f"{Path(located.model_name).name}{CERTIFICATE_SUFFIX}")
    check_result_path(path)
    check_output_location(path, source)
    source_options = {name: options[name] for name in SourceOptions.__annotations__}
    ways: list[RoundtripWay] = []
    for name in names:
        try:
            folder = TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise io_error(path, error) from error
        with folder:
            way = _take_way(
                name, str(checkpoint), source, source_options, Path(folder.name), observer
            )
            ways.append(way)
        observer.note(f"{name}: {way.status}")
    if all(way.status == "not available" for way in ways):
        hint = text("take other ways with {}", Option("layout", "WAY"))
        raise PrepError(f"{source.display_name} has no way back", ways[0].reason, hint)
    result = Roundtrip(
        path=path,
        source=source.display_name,
        revision=located.files.commit,
        ways=tuple(ways),
        versions={"prep": version(), "python": platform.python_version(), "numpy": np.__version__},
        seconds=time.monotonic() - started_s,
    )
    content = {"format": FORMAT_VERSION, **asdict(result)}
    # Equal results have equal certificates.
    del content["path"], content["seconds"]
    write_result(path, json.dumps(content, indent=1).encode() + b"\n", options["overwrite"])
    return result


def _take_way(
    name: str,
    checkpoint: str,
    source: Source,
    source_options: Mapping[str, Any],
    folder: Path,
    observer: Observer,
) -> RoundtripWay:
    """Convert a model in a folder step by step, and compare the end with it."""
    steps = _steps_of(name, source)
    commands: list[str] = []
    for command, options in steps:
        words = [Option(key, options[key]).words(TERMINAL) for key in options]
        commands.append(" ".join([command, *words]))
    way = RoundtripWay(name, tuple(commands), "not available")
    current = checkpoint
    written_nbytes = 0
    for number, (command, step_options) in enumerate(steps):
        out = folder / str(number)
        # The options of the source are for the model alone.
        options = {"memory": source_options["memory"]} if number else dict(source_options)
        if command == "pad-vocab":
            options.pop("step", None)
        silent = SilentCommandObserver(observer.progress(), command)
        try:
            conversion = CONVERSIONS[command](
                current, out, progress=silent, **options, **step_options
            )
        except PrepError as error:
            # An error about the bytes of a model, and not about an unsupported conversion
            is_unread = any(isinstance(each, OSError | DamagedError) for each in causes(error))
            if number or is_unread:
                raise
            # Not every family has every layout, and not every mesh divides a model.
            return replace(way, reason=f"{error.what}: {error.why}")
        if reason := _fault_of(out, name, source):
            return replace(way, reason=reason)
        if number:
            # The disk needs room for two steps of a way, and not for all.
            shutil.rmtree(current)
        current = str(out)
        written_nbytes = conversion.bytes_written
    manifest = read_manifest(Path(current)) or NO_MANIFEST
    silent = SilentCommandObserver(observer.progress(), "verify")
    result = verify(checkpoint, current, progress=silent, strict=True, **source_options)
    differences = [f"{each['tensor']} {each['what']}" for each in result.differences]
    differences += [f"{each['tensor']}: {each['why']}" for each in result.left_out]
    differences += [f"another {each['kind']} `{each['key']}`" for each in result.settings]
    # Names and digests of the files that only one of both has.
    files = file_digests(source).items() ^ recorded_file_digests(manifest).items()
    names = {name for name, _ in files}.difference(MADE_FILES)
    differences += [f"another {name}" for name in sorted(names)]
    lines: list[bytes] = []
    for item in sorted(manifest.tensors.items()):
        line = json.dumps(item, sort_keys=True, separators=(",", ":"))
        lines.append(f"{line}\n".encode())
    return replace(
        way,
        status="different" if differences else "equal",
        tensors=len(lines),
        nbytes=written_nbytes,
        digest=record_digest_of_pieces(lines),
        reason=join_names(differences, max_names=MAX_DIFFERENCES, separator="; "),
    )


def _steps_of(name: str, source: Source) -> list[_Step]:
    """Return the steps of a way for a model."""
    steps = [*WAYS[name]]
    command, options = steps[0]
    if source.tree_manifest and command == "save-init":
        # An init or a training step is resharded. Its vocabulary is padded already, or its user wants none.
        kept = {key: value for key, value in options.items() if key != "pad_vocab"}
        steps[0] = ("reshard", kept)
    if source.quantized:
        # An export of decoded weights may have the bytes of their quantised model. The way back is for the values.
        for number, (command, options) in enumerate(steps):
            if command == "export":
                steps[number] = (command, {**options, "quantized": "dequantize"})
    return steps


def _fault_of(out: Path, name: str, source: Source) -> str:
    """Return why a conversion has no way back, or empty."""
    manifest = read_manifest(out) or NO_MANIFEST
    if manifest.lost_values:
        # Such an output is refused as a source.
        return f"the scale of the layout changes {count_text(manifest.lost_values, 'value')}"
    stored_name = source.names.stored_name
    prefix = source.names.wrapper_prefix
    names = {prefix + stored_name(tensor.name) for tensor in source.tensors}
    if name == VERBATIM_WAY and not names <= manifest.tensors.keys():
        return "the copy has the names of another library"
    return ""
