"""The manifest of an output, `prep-manifest.json`: its source, model, layout and digests, and the check of its files.

prep writes it last, so an output without a manifest is incomplete. Later commands read from it what the files of
other libraries do not say: how leaves map to tensors, and which bytes each of them must have.

`files: {path: {bytes, xxh3}}` lists every file without tensors: settings, tokenizers, and the index of an Orbax item.
Safetensors and msgpack files are listed too. The digests of the tensors cover their payload, so their entries have
`header`, the digest of the remaining bytes, instead of `xxh3`.

The steps of a training run are folders named by their number. A step is saved once it has a manifest: folders of an
object store are only prefixes of names.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import xxhash

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Option, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import find_type_fault, load_json, quote_name
from prepcli.engine.digest import ALGORITHMS, record_digest
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.orbax import MODEL_ITEMS, find_item
from prepcli.planning.item_storage import LEVANTER_METADATA_FILE, METADATA_FILE, ZARR2, ZARR3
from prepcli.planning.libraries import is_scale_record
from prepcli.planning.manifest_fields import (
    KEYS_BY_KIND,
    PREP_KEYS,
    REQUIRED_KEYS,
    FileRecord,
    Manifest,
    OriginRecord,
    TensorRecord,
)
from prepcli.planning.tensors import ITEM_BITS
from prepcli.stores.files import (
    open_regular_file,
    read_small_file,
    resolve_named_path,
    stat_file,
    unreadable_error,
)
from prepcli.stores.paths import AnyPath, PathT, StorePath, path_in_folder, read_each

MANIFEST_FILE = "prep-manifest.json"
METRICS_FILE = "metrics.jsonl"  # of a run, beside its steps
# Item of a training step. The step's manifest is in the parent folder.
STATE_ITEM = "state"
# Step of a model that prep writes for another trainer.
EXPORTED_STEP = 0
FORMAT_VERSION = 1

# An adapter's record of its base model has this key. `restore.digest_checks.sample_digest` computes the value.
SAMPLE_DIGEST_KEY = "sample_digest"
# The manifest of a checkpoint that prep did not write: it is false, and every attribute has its default.
NO_MANIFEST = Manifest()
# The folder and the bytes of `unwritten_manifest`.
_UNWRITTEN: ContextVar[tuple[AnyPath, bytes] | None] = ContextVar(
    "unwritten_manifest", default=None
)
READ_NBYTES = 1 << 20
# Pieces of a file in a store that are in memory at the same time.
PIECES_IN_FLIGHT = 16
# Files that Orbax or Levanter, not prep, names in an item.
ITEM_FILES = {
    METADATA_FILE,
    LEVANTER_METADATA_FILE,
    ZARR2.document,
    ZARR3.document,
    OCDBT_MANIFEST,
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
}
ITEM_DATA_FOLDER = "d"
NO_RECORD: FileRecord = {"bytes": 0}
# Characters of a recorded command in a message. A manifest may come from anywhere.
MAX_REQUEST_LENGTH = 300
VERSION_HINT = "install the version of prep that wrote it"
RECREATE_HINT = "create the checkpoint again, or use an earlier one"


def origin_record(manifest: Manifest | None, commit: str | None) -> OriginRecord:
    """Return the identity of a checkpoint. Empty if it has neither a manifest with a digest nor a commit."""
    record: OriginRecord = {}
    if commit is not None:
        record["commit"] = commit
    # Manifests of early versions have no digest.
    if manifest is not None and manifest.digest is not None:
        record["manifest"] = manifest.digest
    return record


def step_fields(manifest: Manifest) -> Manifest:
    """Return the keys of a training step that its copies keep: the trainer's, and the number of the step.

    A resumed run reads them.
    """
    removed = PREP_KEYS - {"step"}
    return Manifest(**{key: value for key, value in manifest.items() if key not in removed})


def adapter_fields(manifest: Manifest) -> Manifest:
    """Return the keys of a checkpoint of adapters: their settings and their base. Empty for other checkpoints."""
    return Manifest(**{key: manifest[key] for key in ("lora", "base") if key in manifest})


@contextmanager
def unwritten_manifest(folder: AnyPath, data: bytes) -> Iterator[None]:
    """Let `read_manifest` return the manifest in `data` for `folder`, inside the `with` block.

    The manifest file is not read meanwhile. A command checks an output against new records this way, and writes
    them to the file only if the check succeeds.
    """
    token = _UNWRITTEN.set((folder.resolve(), data))
    try:
        yield
    finally:
        _UNWRITTEN.reset(token)


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a folder, if there is one."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    unwritten = _UNWRITTEN.get()
    if unwritten is not None and unwritten[0] == folder.resolve():
        return decode_manifest(path, unwritten[1])
    return decode_manifest(path, read_small_file(path))


def decode_manifest(path: AnyPath, data: bytes) -> Manifest:
    """Decode the bytes of a manifest file and check its digest."""
    manifest = parse_manifest(path, data)
    # Outputs of early versions have no digest to compare.
    recorded = manifest.digest
    if recorded is not None and recorded != manifest_digest(manifest):
        why = f"its content differs from the digest {recorded:.40} that it records"
        raise DamagedError(f"{path} is damaged", why, accept_hint(path.parent, MANIFEST_FILE))
    return manifest


def parse_manifest(path: AnyPath, data: bytes) -> Manifest:
    """Decode the bytes of a manifest file without a check of its digest."""
    try:
        fields = load_json(data)
    except ValueError as error:
        raise DamagedError(f"{path} is broken", str(error), GET_AGAIN_HINT) from error
    if not isinstance(fields, dict):
        why = f"it holds a JSON {type(fields).__name__}, not an object"
        raise DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)
    version = fields.get("format")
    if version != FORMAT_VERSION:
        why = f"its `format` is {version!r:.80}, this version of prep reads {FORMAT_VERSION}"
        what = f"{path} has an unsupported format version"
        raise PrepError(what, why, VERSION_HINT)
    manifest = Manifest(**fields)
    if fault := find_type_fault(fields, Manifest) or _find_fault(manifest):
        raise DamagedError(f"{path} is broken", fault, GET_AGAIN_HINT)
    algorithm = manifest.tensor_digest
    if algorithm not in ALGORITHMS:
        known = " and ".join(ALGORITHMS)
        why = (
            f"its `tensor_digest` is {quote_name(algorithm)}, this version of prep computes {known}"
        )
        what = f"{path} has digests of an unsupported algorithm"
        raise PrepError(what, why, VERSION_HINT)
    return manifest


def manifest_digest(fields: Mapping[str, object]) -> str:
    """Return the XXH3-128 of the canonical JSON of a manifest without its digest: sorted keys, no spaces, ASCII."""
    content = {key: value for key, value in fields.items() if key != "digest"}
    return record_digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def encode_manifest(fields: Mapping[str, object]) -> bytes:
    """Return the bytes of the manifest file, with its own digest if it lists files."""
    content: dict[str, object] = {"format": FORMAT_VERSION, **fields}
    if "files" in fields:
        # JSON turns tuples into lists and keys into text. The digest is one of the stored
        # content, which a reader gets back, so it is computed from the text and not from `fields`.
        # The first text has no indent: Python encodes indented JSON without its encoder in C.
        content = json.loads(json.dumps(content))
        content["digest"] = manifest_digest(content)
    return json.dumps(content, indent=1).encode() + b"\n"


def accept_hint(folder: AnyPath, name: str) -> str:
    """Return the hint for a file unequal to its record in a manifest."""
    command = Command("verify", str(folder), Option("accept", name))
    return text("{} if you changed it on purpose, else {}", command, GET_AGAIN_HINT)


def foreign_output_error(output: str) -> PrepError:
    """Return the error for an output path at which something exists that prep did not write."""
    why = f"it has no {MANIFEST_FILE}: prep only replaces its own outputs"
    hint = text("choose another {}, or remove it", Option("out"))
    return PrepError(f"{output} exists and is something else", why, hint)


def find_manifest_folder(path: PathT) -> PathT:
    """Return the folder with the manifest of `path`: its item, training step or last step of a run.

    Return `path` itself if it has no item.
    """
    item = find_item(path)
    return path if item is None else item_manifest_folder(item)


def item_manifest_folder(item: PathT) -> PathT:
    """Return the folder with the manifest of an item: itself, its training step or its export."""
    if (item / MANIFEST_FILE).exists():
        return item
    # A training step has its manifest next to the item: RUN/10/state and RUN/10/prep-manifest.json.
    is_state_of_step = item.name == STATE_ITEM and (item.parent / MANIFEST_FILE).exists()
    if is_state_of_step:
        return item.parent
    # An export for another trainer has one step: OUT/0/items and OUT/prep-manifest.json.
    export = item.parent.parent
    is_item_of_export = item.name in MODEL_ITEMS and item.parent.name.isdecimal()
    if is_item_of_export and (export / MANIFEST_FILE).exists():
        return export
    return item


def _find_fault(manifest: Manifest) -> str:
    """Return what is wrong with the values of a manifest of correct types, or empty."""
    for key in (*REQUIRED_KEYS, *KEYS_BY_KIND.get(manifest.kind, ())):
        if key not in manifest:
            return f"`{key}` is missing"
    # One version of prep added both keys. If only one is there, the other was removed by hand.
    if ("files" in manifest) != ("digest" in manifest):
        return "it has only one of `files` and `digest`"
    for name, file in manifest.files.items():
        if "xxh3" not in file and "header" not in file:
            return f"the record of {quote_name(name)} has no size and digest"
    for records in (manifest.tensors, *manifest.slots.values(), manifest.others):
        for name, record in records.items():
            if fault := _find_record_fault(record):
                return f"the record of {quote_name(name)} is invalid: {fault}"
    for name, record in manifest.quantized.items():
        if min(record["shape"], default=0) < 0 or record["dtype"] not in ITEM_BITS:
            return f"the record of the quantised {quote_name(name)} is invalid"
    for name, record in manifest.scales.items():
        if not is_scale_record(record):
            return f"the scale of {quote_name(name)} is invalid"
    return ""


def _find_record_fault(record: TensorRecord) -> str:
    """Return what is wrong with the record of a tensor, or empty. Early versions recorded neither dtype nor shape."""
    dtype = record.get("dtype")
    if dtype is not None and dtype not in ITEM_BITS:
        return f"its dtype is {quote_name(dtype)}"
    shape = record.get("shape", ())
    if min(shape, default=0) < 0:
        return f"its shape is {[*shape]}"
    next_row = 0
    for first, stop, _ in record["digests"]:
        if first != next_row or stop < first:
            return f"it has a digest of rows {first} to {stop} after row {next_row}"
        next_row = stop
    return ""


def record_file(path: AnyPath) -> FileRecord:
    """Return size and XXH3-128 of a file. Raise PrepError if it cannot be read."""
    state = xxhash.xxh3_128()
    nbytes = 0
    try:
        with open_regular_file(path) as file:
            while block := file.read(READ_NBYTES):
                state.update(block)
                nbytes += len(block)
    except OSError as error:
        raise unreadable_error(path, error) from error
    return {"bytes": nbytes, "xxh3": state.hexdigest()}


def read_manifest_of_file(file: AnyPath) -> Manifest | None:
    """Read the manifest in the folder of a single file, if it records the file.

    A file of another model may be in the folder of an output: a name alone does not make it a part of the output.
    """
    manifest = read_manifest(file.parent)
    if manifest is None or file.name not in manifest.files:
        return None
    return manifest


def check_files(
    folder: AnyPath,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    hint: Callable[[str], str] | None = None,
) -> None:
    """Check the listed files of an output. Other files are ignored.

    Args:
        folder: Folder of the manifest.
        manifest: The manifest. Manifests of earlier versions of prep list no files.
        names: Names of the listed files to check. None checks all.
        hint: Returns the hint for a damaged file, by its name. By default the hint for a settings file proposes
            `--accept`.

    Raises:
        DamagedError: A file differs from its record, or does not exist.
        PrepError: A file cannot be read, or its path leaves the folder.
    """
    for name, record in manifest.files.items():
        is_selected = names is None or name in names
        if "xxh3" not in record or not is_selected:
            continue
        path = resolve_named_path(folder, name, folder / MANIFEST_FILE)
        what = f"{path} does not exist"
        why = "the manifest lists it"
        if path.exists():
            actual = record_file(path)
            # A later version of prep may add keys to a record, so only these two are compared.
            is_equal_size = actual["bytes"] == record["bytes"]
            if is_equal_size and actual.get("xxh3") == record.get("xxh3"):
                continue
            what = f"{path} is damaged"
            expected = _describe_record(record)
            why = f"it has {_describe_record(actual)}, the manifest records {expected}"
        if hint:
            raise DamagedError(what, why, hint(name))
        if is_settings_file(name):
            raise DamagedError(what, why, accept_hint(folder, name))
        raise DamagedError(what, why, GET_AGAIN_HINT)


def are_files_intact(folder: AnyPath, manifest: Manifest) -> bool:
    """Return whether all listed files of an output exist and are equal to their records."""
    try:
        check_files(folder, manifest)
    except PrepError:
        return False
    return True


def _describe_record(record: FileRecord) -> str:
    return f"{count_text(record['bytes'], 'byte')} with the digest {record.get('xxh3', ''):.40}"


def recorded_xxh3(path: AnyPath, folder: AnyPath, manifest: Manifest) -> str:
    """Return the recorded digest of a file. Empty if the manifest in `folder` lists no such file."""
    name = path_in_folder(path, folder)
    record = NO_RECORD if name is None else manifest.files.get(name.as_posix(), NO_RECORD)
    return record.get("xxh3", "")


def is_settings_file(name: str) -> bool:
    """Return whether a listed file is one that users edit: not the metadata or the index of an Orbax item."""
    *folders, file = name.split("/")
    return file not in ITEM_FILES and ITEM_DATA_FOLDER not in folders


def check_header(path: AnyPath, manifest: Manifest, header_digest: str) -> None:
    """Raise DamagedError if the XXH3-128 of a data file's bytes outside of its tensors differs from its record."""
    # An earlier version of prep lists no files, and another library's file has no record.
    expected = manifest.files.get(path.name, NO_RECORD).get("header", header_digest)
    if header_digest != expected:
        why = f"its header has the digest {header_digest}, the manifest records {expected:.40}"
        raise DamagedError(f"{path} is damaged", why, GET_AGAIN_HINT)


def bytes_between(path: AnyPath, ranges: Iterable[Range]) -> Iterator[bytes]:
    """Yield the bytes of a file outside of its tensors: the headers and directories of the archives.

    `ranges` are the tensors, in ascending order. Pieces of a file in a store are requested several at a time.
    """
    pieces = _pieces_between(ranges, stat_file(path).st_size)
    if isinstance(path, StorePath):
        while batch := list(itertools.islice(pieces, PIECES_IN_FLIGHT)):
            yield from read_each(lambda piece: path.read_exactly(*piece), batch, in_store=True)
        return
    with open_regular_file(path) as file:
        for start, stop in pieces:
            file.seek(start)
            yield file.read(stop - start)


def _pieces_between(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """Yield the byte ranges outside of the given ones, in pieces of at most READ_NBYTES."""
    position = 0
    for first, stop in itertools.chain(ranges, [(size, size)]):
        # A manifest of another origin may come with a file of any size between two tensors.
        for start in range(position, min(first, size), READ_NBYTES):
            yield start, min(start + READ_NBYTES, first, size)
        position = stop


def again_hint(manifest: Manifest | None) -> str:
    """Return the hint to replace a damaged checkpoint. For an output it is the command in its manifest."""
    if manifest is None:
        return GET_AGAIN_HINT
    if manifest.is_training_step:
        return RECREATE_HINT
    request = " ".join(manifest.request.split())
    if not request:
        return GET_AGAIN_HINT
    return f"make it again: `{request:.{MAX_REQUEST_LENGTH}}`"


@contextmanager
def again_hints(manifest: Manifest | None) -> Iterator[None]:
    """Name the command of an output in errors of the block about its damaged and missing files."""
    try:
        yield
    except PrepError as error:
        if manifest is None:
            raise
        hint = error.hint.replace(GET_AGAIN_HINT, again_hint(manifest))
        if isinstance(error.__cause__, FileNotFoundError):
            hint = again_hint(manifest)
        raise error.with_texts(hint=hint) from error.__cause__


# Files of each run, from its first start on.
RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"
STEP_NAME = re.compile("0|[1-9][0-9]{0,17}")
LISTED_MANIFEST = re.compile(f"({STEP_NAME.pattern})/{re.escape(MANIFEST_FILE)}")


def step_folder(run: PathT, step: int) -> PathT:
    """Return the folder of a step's checkpoint."""
    return run / str(step)


def saved_steps(run: AnyPath) -> list[int]:
    """Return the steps with complete checkpoints, ascending. An empty list if the run does not exist."""
    try:
        children = [child.name for child in run.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from error
    steps: list[int] = []
    for name in filter(STEP_NAME.fullmatch, children):
        has_manifest = (run / name / MANIFEST_FILE).is_file()
        if has_manifest and (run / name / STATE_ITEM / METADATA_FILE).is_file():
            steps.append(int(name))
    return sorted(steps)


def is_begun_run(names: Collection[str]) -> bool:
    """Return whether a folder or prefix with these names is a training run. It may have no step yet."""
    return RECIPE_FILE in names and ENVIRONMENT_FILE in names


def no_step_error(run: str) -> PrepError:
    """Return the error for a run without a checkpoint."""
    hint = text("{} continues it", Command("train", "RECIPE", Option("out", run)))
    why = "a run is a checkpoint from its first saved step on"
    return PrepError(f"no step of the run {run} is saved yet", why, hint)


def listed_steps(paths: Iterable[str]) -> list[int]:
    """Return the steps with a manifest among the paths of a run's files, ascending."""
    matches = (LISTED_MANIFEST.fullmatch(path) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def listed_step(path: str) -> int | None:
    """Return the step of a path in a run. None if it is a file of the run itself."""
    name, slash, _ = path.partition("/")
    if slash and STEP_NAME.fullmatch(name):
        return int(name)
    return None
