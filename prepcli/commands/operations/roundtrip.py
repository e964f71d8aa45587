"""Convert a model to every layout and back, and certify that no bit changed."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from prepcli.commands.operations.chain_link import LinkReport, compare_files, differing_keys
from prepcli.commands.operations.compared_settings import compared_config
from prepcli.commands.operations.conversion import CommonOptions, common_options, open_checkpoint
from prepcli.commands.operations.export import export
from prepcli.commands.operations.inspection_options import RoundtripOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.commands.operations.output_location import check_output_location
from prepcli.commands.operations.pad_vocab import pad_vocab
from prepcli.commands.operations.result_files import (
    check_result_path,
    has_content,
    write_result_file,
)
from prepcli.commands.operations.results import Conversion, Roundtrip, RoundtripWay
from prepcli.commands.operations.save_init import reshard, save_init
from prepcli.commands.operations.verify import verify
from prepcli.core.counts import count_text
from prepcli.core.errors import TERMINAL, DamagedError, Option, PrepError, text, usage_error
from prepcli.core.json_types import HFConfig
from prepcli.core.lists import join_names
from prepcli.core.observer import Observer, SilentCommandObserver, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.core.progress import Progress
from prepcli.core.suggest import did_you_mean
from prepcli.core.version import version
from prepcli.engine.digest import digest_pieces
from prepcli.engine.files import io_error
from prepcli.execution.locks import acquire_lock
from prepcli.execution.paths import remove_path
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from prepcli.planning.manifest_fields import TensorRecord, TensorRecords
from prepcli.planning.tensors import array_bits
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.sources.locate import check_stream
from prepcli.sources.source import Source

LOCK = "lock"
CERTIFICATE_SUFFIX = ".roundtrip.json"
FORMAT_VERSION = 1
# Differences in a certificate.
MAX_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class _Step:
    """One conversion of a round trip: its command, and the options of the Python function."""

    command: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the command with its options, e.g. `export --layout easylm`."""
        words = [self.command]
        for name, value in self.options.items():
            words.append(Option(name, value).words(TERMINAL))
        return " ".join(words)


CONVERSIONS: dict[str, Callable[..., Conversion]] = {
    "pad-vocab": pad_vocab,
    "save-init": save_init,
    "reshard": reshard,
    "export": export,
}
EXPORT = _Step("export", {})
INIT = _Step("save-init", {})
VERBATIM_WAY = "verbatim"
# The steps from a model to a Hugging Face folder, by the name of the way.
WAYS: dict[str, tuple[_Step, ...]] = {
    "init": (INIT, EXPORT),
    "no-scan": (_Step("save-init", {"scan": False}), EXPORT),
    "scan-axis": (_Step("save-init", {"scan_axis": 1}), EXPORT),
    "mesh": (
        # Both meshes split the vocabulary by 2.
        _Step("save-init", {"mesh": "1,2,2", "pad_vocab": "auto"}),
        _Step("reshard", {"mesh": "1,1,2", "scan": False}),
        EXPORT,
    ),
    "compress": (_Step("save-init", {"compress": "zstd"}), EXPORT),
    "pad": (_Step("pad-vocab", {"multiple": 128}), INIT, EXPORT),
    VERBATIM_WAY: (_Step("save-init", {"verbatim": True}), EXPORT),
    "hf-flax": (_Step("export", {"layout": "hf-flax"}), INIT, EXPORT),
    "easylm": (_Step("export", {"layout": "easylm"}), INIT, EXPORT),
    "tunix": (_Step("export", {"layout": "tunix"}), INIT, EXPORT),
    "maxtext": (_Step("export", {"layout": "maxtext"}), INIT, EXPORT),
    "maxtext-unscanned": (_Step("export", {"layout": "maxtext-unscanned"}), INIT, EXPORT),
    "dcp": (_Step("export", {"format": "dcp"}), INIT, EXPORT),
    "files": (_Step("save-init", {"storage": "files"}), EXPORT),
    "zarr3": (_Step("save-init", {"storage": "zarr3"}), EXPORT),
    "zarr3-files": (_Step("save-init", {"storage": "zarr3-files"}), EXPORT),
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

    The conversions are written to a temporary folder next to the certificate, one way after another.

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
    check_stream(common.stream, located)
    model_name = Path(located.model_name).name
    path = Path(out) if out is not None else Path(f"{model_name}{CERTIFICATE_SUFFIX}")
    check_result_path(path)
    check_output_location(path, source)
    trip = _Trip(
        checkpoint=str(checkpoint),
        common=common,
        source_options={name: options[name] for name in SourceOptions.__annotations__},
        observer=observer,
        source=source,
    )
    ways: list[RoundtripWay] = []
    with _working_folder(path) as folder:
        for name in names:
            way_folder = folder / name
            way_folder.mkdir()
            way = trip.take(name, _steps(name, source), way_folder)
            shutil.rmtree(way_folder)
            observer.note(f"{way.name}: {way.status}")
            ways.append(way)
    if all(way.status == "not available" for way in ways):
        hint = text("take other ways with {}", Option("layout", "WAY"))
        raise PrepError(f"{source.display_name} has no way back", ways[0].reason, hint)
    result = Roundtrip(
        path=path,
        source=source.display_name,
        revision=located.local_files.commit,
        ways=tuple(ways),
        versions={"prep": version(), "python": platform.python_version(), "numpy": np.__version__},
        seconds=time.monotonic() - started_s,
    )
    _write_certificate(result, overwrite=options["overwrite"])
    return result


def _steps(name: str, source: Source) -> tuple[_Step, ...]:
    """Return the steps of a way. An init or a training step is resharded instead of converted to an init."""
    first, *others = WAYS[name]
    if source.tree_manifest and first.command == "save-init":
        options = dict(first.options)
        # Its vocabulary is padded already, or its user wants none.
        options.pop("pad_vocab", None)
        first = _Step("reshard", options)
    steps: list[_Step] = []
    for step in (first, *others):
        if source.quantized and step.command == "export":
            # An export of decoded weights may have the bytes of their quantised model. The way back is for the values.
            step = _Step(step.command, {**step.options, "quantized": "dequantize"})
        steps.append(step)
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class _Trip:
    """A model to convert on several ways.

    Attributes:
        checkpoint: The model.
        common: Options to open it with.
        source_options: The same options for other operations.
        observer: Receives progress.
        source: The opened model.
    """

    checkpoint: str
    common: CommonOptions
    source_options: Mapping[str, Any]
    observer: Observer
    source: Source

    def take(self, name: str, steps: Sequence[_Step], folder: Path) -> RoundtripWay:
        """Convert the model in a folder, and compare the result with it."""
        way = RoundtripWay(name, tuple(str(step) for step in steps), "not available")
        try:
            self._convert(self.checkpoint, folder / "0", steps[0], is_first=True, dry_run=True)
        except PrepError as error:
            if _is_damaged_or_unread(error):
                raise
            # Not every family has every layout, and not every mesh divides a model.
            return replace(way, reason=f"{error.what}: {error.why}")
        if name == VERBATIM_WAY and not self._has_stored_names():
            return replace(way, reason="the copy has the names of another library")
        current = self.checkpoint
        for number, step in enumerate(steps):
            out = folder / str(number)
            self._convert(current, out, step, is_first=number == 0)
            lost_values = (read_manifest(out) or NO_MANIFEST).lost_values
            if lost_values:
                # Such an output is refused as a source.
                reason = f"the scale of the layout changes {count_text(lost_values, 'value')}"
                return replace(way, reason=reason)
            if number:
                # The disk needs room for two steps of a way, and not for all.
                shutil.rmtree(current)
            current = str(out)
        return self._compare(way, current)

    def _has_stored_names(self) -> bool:
        """Return whether a verbatim copy has tensors with the names of the model, e.g. not one of MaxText's tree."""
        _, verbatim = open_checkpoint(replace(self.common, verbatim=True), self.observer)
        stored_names = {tensor.name for tensor in verbatim.tensors}
        names = self.source.names
        for tensor in self.source.tensors:
            if names.wrapper_prefix + names.stored_name(tensor.name) not in stored_names:
                return False
        return True

    def _convert(
        self, checkpoint: str, out: Path, step: _Step, *, is_first: bool, dry_run: bool = False
    ) -> None:
        """Run a step. The options of the source are for the model alone."""
        options: dict[str, Any] = {"memory": self.source_options["memory"]}
        if is_first:
            options = dict(self.source_options)
            if step.command == "pad-vocab":
                del options["step"]
        convert = CONVERSIONS[step.command]
        observer = SilentCommandObserver(self.observer.progress(), step.command)
        convert(checkpoint, out, dry_run=dry_run, progress=observer, **options, **step.options)

    def _compare(self, way: RoundtripWay, back: str) -> RoundtripWay:
        """Compare the end of a way with the model: tensors, config, tokenizer and other files."""
        observer = SilentCommandObserver(self.observer.progress(), "verify")
        verification = verify(self.checkpoint, back, progress=observer, **self.source_options)
        differences: list[str] = []
        for difference in verification.differences:
            differences.append(f"{difference['tensor']} {difference['what']}")
        common = replace(self.common, checkpoint=back, revision=None, step=None, config=None)
        _, returned = open_checkpoint(replace(common, lock=None), observer)
        report = LinkReport()
        compare_files(returned, self.source, report)
        differences += report.differences
        differences += [f"{name} is not in {self.source.display_name}" for name in report.unproven]
        source_config = _unpadded_config(returned, self.source)
        for key in sorted(differing_keys(compared_config(returned, self.source), source_config)):
            name = self.source.display_name
            differences.append(f"config.json has another `{key}` than {name}")
        records = (read_manifest(Path(back)) or NO_MANIFEST).tensors
        return replace(
            way,
            status="different" if differences else "equal",
            tensors=len(records),
            nbytes=sum(_nbytes(record) for record in records.values()),
            digest=_digest(records),
            reason=join_names(differences, max_names=MAX_DIFFERENCES, separator="; "),
        )


def _is_damaged_or_unread(error: PrepError) -> bool:
    """Return whether an error is about the bytes of a model, and not about an unsupported conversion."""
    if isinstance(error, DamagedError):
        return True
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, OSError | DamagedError):
            return True
        cause = cause.__cause__
    return False


def _unpadded_config(output: Source, source: Source) -> HFConfig:
    """Return the config of a model without the padding of its vocabulary, to compare with an export."""
    config = compared_config(source, output)
    vocabulary = source.vocabulary()
    if vocabulary.true_size == vocabulary.stored_size:
        return config
    return with_vocabulary(config, Vocabulary(vocabulary.true_size, vocabulary.true_size))


def _nbytes(record: TensorRecord) -> int:
    return array_bits(record.get("dtype", ""), tuple(record.get("shape", ()))) // 8


def _digest(records: TensorRecords) -> str:
    """Return the XXH3-128 of one line per tensor: name, dtype, shape and digests, as canonical JSON."""
    lines: list[bytes] = []
    for name, record in sorted(records.items()):
        line = json.dumps([name, record], sort_keys=True, separators=(",", ":"))
        lines.append(line.encode() + b"\n")
    return digest_pieces(lines)


@contextmanager
def _working_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to the certificate, and remove it at the end of the block.

    Raises:
        PrepError: Another process works there, or the folder is not one of a killed run.
    """
    folder = path.parent / f".{path.name}.work"
    lock_path = folder / LOCK
    try:
        if folder.is_symlink() or (folder.exists() and not lock_path.is_file()):
            why = "it was not made by this command"
            raise PrepError(f"{folder} exists", why, "move it away")
        folder.mkdir(exist_ok=True)
        lock = acquire_lock(lock_path, path)
    except OSError as error:
        raise io_error(folder, error) from error
    try:
        # A killed run has left its conversions.
        for entry in folder.iterdir():
            if entry != lock_path:
                remove_path(entry)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _write_certificate(result: Roundtrip, *, overwrite: bool) -> None:
    """Write the certificate. Equal results have equal files.

    Raises:
        OutputExistsError: Another file exists.
    """
    content = {"format": FORMAT_VERSION, **asdict(result)}
    del content["path"], content["seconds"]
    data = json.dumps(content, indent=1).encode() + b"\n"
    hint = text("{} replaces it", Option("overwrite", True))
    why = "its content differs"
    if not has_content(result.path, data, overwrite=overwrite, why=why, hint=hint):
        write_result_file(result.path, data)
