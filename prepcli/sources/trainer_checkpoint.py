"""Read the training state of a checkpoint of transformers' Trainer: optimizer.pt and trainer_state.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import digest_pieces
from prepcli.engine.files import allocate_buffer
from prepcli.engine.fills import numpy_dtype
from prepcli.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.file_records import bytes_between
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_objects import ArchivedTensor, TorchObject, read_torch_object
from prepcli.planning.plan import Contiguous, SourceFile, Strided
from prepcli.planning.state_names import qualify
from prepcli.sources.adam_state import MOMENTS, AdamSettings
from prepcli.sources.foreign_state import (
    WITHOUT_STATE_HINT,
    ForeignState,
    add_foreign_state,
    one_count,
)
from prepcli.sources.source import Source, SourceTensor, read_json_object, recorded_digests
from trainer.models.module_order import module_order, optimizer_groups

OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
TRAINER_STATE_FILE = "trainer_state.json"
# Files with state that no other framework has a place for.
OTHER_FILES = ("rng_state.pth", "scaler.pt", "training_args.bin", "scheduler.pt")
# Entries of the state of `torch.optim.AdamW`, by the slots of `adam_state`.
ENTRIES = ("exp_avg", "exp_avg_sq")
NUM_UPDATES = "step"


def read_trainer_checkpoint(source: Source) -> Source:
    """Return a Hugging Face folder with the training state in its other files.

    Raises:
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    path = _optimizer_path(source)
    optimizer = read_torch_object(path)
    entries, groups = _state_dict(path, optimizer)
    names = _numbered_names(source, path, groups)
    tensors = dict(_numbered_entries(path, entries, names))
    step = _global_step(source)
    file_number = len(source.byte_sources)
    settings = _settings(path, groups)
    num_updates = _num_updates(source, path, tensors)
    state = ForeignState(
        moments=tuple(_moments(source, path, tensors, file_number=file_number)),
        step=step,
        num_updates=num_updates,
        settings=settings,
        left_out=_other_files(source),
        files=(path,),
        stamps=(_stamp(source, path, optimizer, tensors),),
    )
    return add_foreign_state(source, state)


def _optimizer_path(source: Source) -> Path:
    """Return the path of the optimizer's state."""
    for name in OPTIMIZER_FILES:
        path = source.root / name
        if path.is_file():
            return path
    what = f"{source.display_name} has no training state"
    why = f"it has no {OPTIMIZER_FILES[0]}"
    raise PrepError(what, why, WITHOUT_STATE_HINT)


def _other_files(source: Source) -> tuple[str, ...]:
    """Return the names of files with unconverted state."""
    return tuple(name for name in OTHER_FILES if (source.root / name).is_file())


def _global_step(source: Source) -> int:
    """Return the number of the last step."""
    state = read_json_object(source.root / TRAINER_STATE_FILE)
    step = state.get("global_step")
    if not isinstance(step, int) or step < 0:
        what = f"{source.root / TRAINER_STATE_FILE} is broken"
        raise DamagedError(what, f"global_step is {step!r:.40}", GET_AGAIN_HINT)
    return step


def _state_dict(path: Path, optimizer: TorchObject) -> tuple[Mapping[Any, Any], list[Any]]:
    """Return `state` and `param_groups` of the optimizer's state dict."""
    root = optimizer.root
    entries: object = None
    groups: object = None
    if isinstance(root, dict):
        entries = root.get("state")
        groups = root.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list) or not groups:
        raise DamagedError(
            f"{path} is no state of an optimizer", "it lacks state or param_groups", GET_AGAIN_HINT
        )
    return entries, groups


def _numbered_names(source: Source, path: Path, groups: list[Any]) -> Sequence[str]:
    """Return the file name of each parameter, by its number in the optimizer."""
    names = parameter_names(source)
    numbers: list[int] = []
    for group in groups:
        numbers += group["params"]
    sizes = [len(group["params"]) for group in groups]
    if len(groups) == 1:
        ordered: Sequence[str] = module_order(source.family.name, names)
        expected = [len(ordered)]
    else:
        pair = optimizer_groups(source.family.name, names)
        ordered = pair.numbered
        expected = [len(pair.decayed), len(pair.not_decayed)]
    # PyTorch numbers the parameters group by group.
    if sizes != expected or numbers != list(range(len(ordered))):
        raise PrepError(
            f"{path} does not fit the parameters of {source.display_name}",
            f"its groups have {sizes} parameters, Trainer builds groups of {expected} for this model",
            WITHOUT_STATE_HINT,
        )
    return ordered


def parameter_names(source: Source) -> list[str]:
    """Return the names of the parameters in files. A tied head is the embedding, and no parameter of its own."""
    family = source.family
    names: list[str] = []
    for tensor in source.tensors:
        is_head = tensor.name == family.tying.head_tensor
        if not (is_head and family.is_tied(source.config)):
            names.append(source.file_name(tensor))
    return names


def _numbered_entries(
    path: Path, entries: Mapping[Any, Any], names: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, ArchivedTensor]]]:
    """Yield the name of each parameter and its entries.

    Raises:
        PrepError: A parameter has no state, or the state of another optimizer.
    """
    for number, name in enumerate(names):
        entry = entries.get(number)
        if not isinstance(entry, dict):
            why = "the parameter was frozen, or the optimizer has taken no step"
            raise PrepError(f"{path} has no moments of {name}", why, WITHOUT_STATE_HINT)
        tensors = {key: value for key, value in entry.items() if isinstance(value, ArchivedTensor)}
        if tensors.keys() != {*ENTRIES, NUM_UPDATES}:
            why = f"the state of {name} is {', '.join(map(str, entry))}"
            what = f"{path} is no state of AdamW"
            raise PrepError(what, why, "train with the optimizer adamw_torch")
        yield name, tensors


def _settings(path: Path, groups: list[Any]) -> AdamSettings:
    """Return the settings of all groups, and the weight decay of the first group."""
    first = groups[0]
    for key in ("lr", "betas", "eps"):
        if any(group.get(key) != first.get(key) for group in groups):
            why = f"{key} is {first.get(key)} in one group, and not in another"
            raise PrepError(f"the groups of {path} are not supported", why, WITHOUT_STATE_HINT)
    if first.get("amsgrad") or first.get("maximize"):
        why = "it was trained with amsgrad or maximize"
        raise PrepError(f"{path} is not supported", why, WITHOUT_STATE_HINT)
    b1, b2 = first["betas"]
    return AdamSettings(
        lr=float(first["lr"]),
        peak_lr=float(first.get("initial_lr", first["lr"])),
        b1=float(b1),
        b2=float(b2),
        eps=float(first["eps"]),
        weight_decay=float(first["weight_decay"]),
    )


def _num_updates(
    source: Source, path: Path, tensors: Mapping[str, Mapping[str, ArchivedTensor]]
) -> int:
    """Return the number of updates. All parameters have the same one."""
    counts: dict[str, float] = {}
    with open_blobs([path]) as files:
        for name, entry in tensors.items():
            count = entry[NUM_UPDATES]
            buffer = allocate_buffer(count.nbytes)[: count.nbytes]
            files.read_at(0, count.offset, buffer)
            counts[name] = np.frombuffer(bytes(buffer), numpy_dtype(count.dtype))[0].item()
    return one_count(source, counts)


def _moments(
    source: Source,
    path: Path,
    tensors: Mapping[str, Mapping[str, ArchivedTensor]],
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
    path: Path,
    optimizer: TorchObject,
    tensors: Mapping[str, Mapping[str, ArchivedTensor]],
) -> SourceFile:
    """Return the stamp of the file. Of an output of prep, it has the digest of the bytes outside of moments."""
    metadata_digest = optimizer.digest
    if source.manifest is not None:
        ranges: list[tuple[int, int]] = []
        for entries in tensors.values():
            for name in ENTRIES:
                moment = entries[name]
                ranges.append((moment.offset, moment.offset + moment.nbytes))
        metadata_digest = digest_pieces(bytes_between(path, sorted(ranges), optimizer.size))
    return SourceFile(path.name, optimizer.size, optimizer.mtime_ns, metadata_digest)
