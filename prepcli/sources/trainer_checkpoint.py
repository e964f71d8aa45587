"""Read the training state of a checkpoint of transformers' Trainer: optimizer.pt and trainer_state.json."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import digest_pieces
from prepcli.engine.files import allocate_buffer
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.file_records import bytes_between
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_files import TorchObject, read_torch_object
from prepcli.formats.torch_tensors import TorchTensor
from prepcli.formats.untrusted import unreadable_error
from prepcli.models.module_order import module_order, optimizer_groups
from prepcli.planning.plan import Contiguous, SourceFile, Strided
from prepcli.planning.state_names import qualify
from prepcli.remote.placeholders import RemoteCheckpoint
from prepcli.remote.remote_files import RemoteBlob
from prepcli.remote.remote_stream import RemoteStream
from prepcli.sources.adam_state import MOMENTS, trained_tensors
from prepcli.sources.foreign_state import (
    MAX_COUNT,
    WITHOUT_STATE_HINT,
    ForeignState,
    adam_settings,
    add_foreign_state,
    decay_notes,
    one_count,
)
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import (
    SCHEDULER_FILE,
    Source,
    SourceTensor,
    read_json_object,
    recorded_digests,
)

OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
# trainer_state.json has a line of about 200 bytes for each logged step.
MAX_TRAINER_STATE_NBYTES = 128 << 20
# Files with state that no other framework has a place for.
OTHER_FILES = ("rng_state.pth", "scaler.pt", "training_args.bin", SCHEDULER_FILE)
# Entries of the state of `torch.optim.AdamW`, by the slots of `adam_state`.
ENTRIES = ("exp_avg", "exp_avg_sq")
NUM_UPDATES = "step"


def read_trainer_checkpoint(source: Source, remote: RemoteCheckpoint | None) -> Source:
    """Return a Hugging Face folder with the training state in its other files.

    Args:
        source: The opened folder.
        remote: The remote checkpoint, if the folder has its placeholder files.

    Raises:
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    path = _optimizer_path(source)
    blob: Path | RemoteBlob = path
    if remote is not None:
        (blob,) = remote.remote_files([path])
    with _open_file(blob) as file:
        optimizer = read_torch_object(path, file)
    entries, groups = _state_dict(path, optimizer)
    keys = _parameter_keys(source, path, groups)
    tensors = dict(_named_entries(path, entries, keys))
    step = _global_step(source)
    file_number = len(source.byte_sources)
    settings = adam_settings(str(path), groups)
    num_updates = _num_updates(source, blob, tensors)
    decays: dict[str, float] = {}
    for group in groups:
        decays |= {keys[key]: group["weight_decay"] for key in group["params"]}
    state = ForeignState(
        moments=tuple(_moments(source, path, tensors, file_number=file_number)),
        step=step,
        num_updates=num_updates,
        settings=settings,
        left_out=(*_other_files(source), *decay_notes(source, decays)),
        files=(path,),
        stamps=(_stamp(source, blob, path.name, optimizer, tensors),),
    )
    return add_foreign_state(source, state)


def _open_file(blob: Path | RemoteBlob) -> BinaryIO:
    """Open a local or remote file for reading.

    Raises:
        PrepError: The file cannot be read.
    """
    if isinstance(blob, Path):
        try:
            return blob.open("rb")
        except OSError as error:
            raise unreadable_error(blob, error) from error
    return io.BufferedReader(RemoteStream(blob.file, blob.cache))


def _optimizer_path(source: Source) -> Path:
    """Return the path of the optimizer's state."""
    for name in OPTIMIZER_FILES:
        path = source.root / name
        if path.is_file():
            return path
    why = f"it has no {OPTIMIZER_FILES[0]}"
    if source.manifest is not None and OPTIMIZER_FILES[0] in source.manifest.files:
        raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    what = f"{source.display_name} has no training state"
    raise PrepError(what, why, WITHOUT_STATE_HINT)


def _other_files(source: Source) -> tuple[str, ...]:
    """Return the names of files with unconverted state."""
    return tuple(name for name in OTHER_FILES if (source.root / name).is_file())


def _global_step(source: Source) -> int:
    """Return the number of the last step."""
    state = read_json_object(source.root / TRAINER_STATE_FILE, MAX_TRAINER_STATE_NBYTES)
    step = state.get("global_step")
    if type(step) is not int or not 0 <= step <= MAX_COUNT:
        what = f"{source.root / TRAINER_STATE_FILE} is broken"
        raise DamagedError(what, f"global_step is {step!r:.40}", GET_AGAIN_HINT)
    return step


def _state_dict(
    path: Path, optimizer: TorchObject
) -> tuple[Mapping[Any, Any], Sequence[Mapping[Any, Any]]]:
    """Return `state` and `param_groups` of the optimizer's state dict."""
    root = optimizer.root
    if isinstance(root, dict):
        entries = root.get("state")
        groups = root.get("param_groups")
        if isinstance(entries, dict) and isinstance(groups, list) and all(map(_is_group, groups)):
            return entries, groups
    what = f"{path} is no state of an optimizer"
    raise DamagedError(what, "it lacks state or param_groups", GET_AGAIN_HINT)


def _is_group(value: object) -> bool:
    """Return whether a value is a group of parameters."""
    keys = value.get("params") if isinstance(value, dict) else None
    return isinstance(keys, list) and all(isinstance(key, int | str) for key in keys)


def _parameter_keys(
    source: Source, path: Path, groups: Sequence[Mapping[Any, Any]]
) -> Mapping[int | str, str]:
    """Return the file name of each parameter, by its key in the optimizer.

    Keys are numbers, or the names themselves in a checkpoint of FSDP.
    """
    names = [source.file_name(tensor) for tensor in trained_tensors(source)]
    keys: list[int | str] = []
    for group in groups:
        keys += group["params"]
    if set(keys) == set(names):
        return {name: name for name in names}
    sizes = [len(group["params"]) for group in groups]
    if len(groups) == 1:
        ordered: Sequence[str] = module_order(source.family.name, names)
        expected = [len(ordered)]
    else:
        pair = optimizer_groups(source.family.name, names)
        ordered = pair.numbered
        expected = [len(pair.decayed), len(pair.not_decayed)]
    # PyTorch numbers the parameters group by group.
    if sizes != expected or keys != list(range(len(ordered))):
        raise PrepError(
            f"{path} does not fit the parameters of {source.display_name}",
            f"its groups have {sizes} parameters, Trainer builds groups of {expected} for this model",
            WITHOUT_STATE_HINT,
        )
    return dict(enumerate(ordered))


def _named_entries(
    path: Path, entries: Mapping[Any, Any], keys: Mapping[int | str, str]
) -> Iterator[tuple[str, Mapping[str, TorchTensor]]]:
    """Yield the name of each parameter and its entries.

    Raises:
        PrepError: A parameter has no state, or the state of another optimizer, or there is state of other parameters.
    """
    for key, name in keys.items():
        entry = entries.get(key)
        if not isinstance(entry, dict):
            why = "the parameter was frozen, or the optimizer has taken no step"
            raise PrepError(f"{path} has no moments of {name}", why, WITHOUT_STATE_HINT)
        tensors = {key: value for key, value in entry.items() if isinstance(value, TorchTensor)}
        if tensors.keys() != {*ENTRIES, NUM_UPDATES}:
            why = f"the state of {name} is {', '.join(map(str, entry))}"
            what = f"{path} is no state of AdamW"
            raise PrepError(what, why, "train with the optimizer adamw_torch")
        yield name, tensors
    unknown = [key for key in entries if key not in keys]
    if unknown:
        why = f"no group of parameters has the key {unknown[0]}"
        raise DamagedError(f"{path} has unused moments", why, GET_AGAIN_HINT)


def _num_updates(
    source: Source, blob: Path | RemoteBlob, tensors: Mapping[str, Mapping[str, TorchTensor]]
) -> int:
    """Return the number of updates. All parameters have the same one."""
    counts: dict[str, float] = {}
    with open_blobs([blob]) as files:
        for name, entry in tensors.items():
            count = entry[NUM_UPDATES]
            if math.prod(count.shape) != 1:
                why = f"the step of {name} is {list(count.shape)}, and must have one element"
                raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
            buffer = allocate_buffer(count.nbytes)[: count.nbytes]
            files.read_at(0, count.offset, buffer)
            counts[name] = np.frombuffer(bytes(buffer), numpy_dtype(count.dtype))[0].item()
    return one_count(source, counts)


def _moments(
    source: Source,
    path: Path,
    tensors: Mapping[str, Mapping[str, TorchTensor]],
    *,
    file_number: int,
) -> Iterator[SourceTensor]:
    """Yield the moments of all parameters, slot by slot."""
    manifest = source.manifest or NO_MANIFEST
    parameters = {source.file_name(tensor): tensor for tensor in source.tensors}
    for slot, entry in zip(MOMENTS, ENTRIES, strict=True):
        for name, entries in tensors.items():
            parameter = parameters[name]
            moment = entries[entry]
            if moment.shape != parameter.shape:
                why = f"it is {list(moment.shape)}, the parameter {list(parameter.shape)}"
                raise PrepError(f"{path}: {entry} of {name} has another shape", why, GET_AGAIN_HINT)
            placement = Contiguous(file_number, moment.offset)
            if moment.byte_strides is not None:
                placement = Strided(file_number, moment.offset, moment.byte_strides)
            digests = recorded_digests(manifest.slots.get(slot, {}), name)
            yield SourceTensor(
                qualify(slot, parameter.name), moment.dtype, moment.shape, (placement,), digests
            )


def _stamp(
    source: Source,
    blob: Path | RemoteBlob,
    name: str,
    optimizer: TorchObject,
    tensors: Mapping[str, Mapping[str, TorchTensor]],
) -> SourceFile:
    """Return the stamp of the file. Of an output of prep, it has the digest of the bytes outside of moments."""
    metadata_digest = optimizer.digest
    if source.manifest is not None:
        ranges: list[tuple[int, int]] = []
        for entries in tensors.values():
            for entry in ENTRIES:
                moment = entries[entry]
                ranges.append((moment.offset, moment.offset + moment.nbytes))
        with _open_file(blob) as file:
            metadata_digest = digest_pieces(bytes_between(file, sorted(ranges), optimizer.size))
    return SourceFile(name, optimizer.size, optimizer.mtime_ns, metadata_digest)
