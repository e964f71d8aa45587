"""Read the training state of a torch distributed checkpoint, in the form of `get_state_dict` of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, Option, PrepError, text, usage_error
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_dcp import DcpFolder, DcpTensor, read_dcp_folder, read_dcp_value
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import OPT_STATE_RULE, qualify
from prepcli.sources.adam_state import MOMENTS, read_scalar, trained_tensors
from prepcli.sources.dcp_trees import TORCHTITAN_EMBEDDING
from prepcli.sources.foreign_state import (
    WITHOUT_STATE_HINT,
    ForeignState,
    adam_settings,
    add_foreign_state,
    decay_notes,
    one_count,
)
from prepcli.sources.openers.dcp_folder import STATE_PREFIX, box_locations
from prepcli.sources.source import Source, SourceTensor, recorded_digests
from prepcli.sources.trainer_checkpoint import ENTRIES, NUM_UPDATES

OPTIMIZER = "optimizer"
GROUPS_PREFIX = f"{OPTIMIZER}.param_groups"
GROUP_KEYS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay"),
    *("amsgrad", "maximize", "decoupled_weight_decay", "params"),
)


def read_dcp_state(source: Source) -> Source:
    """Return a torch distributed checkpoint with its training state.

    Raises:
        UsageError: The checkpoint is one of torchtitan.
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    folder = read_dcp_folder(source.root)
    tensors = {tensor.name: tensor for tensor in folder.tensors}
    if TORCHTITAN_EMBEDDING in tensors:
        what = text(
            "{} is not supported for {}", Option("training_state", True), source.display_name
        )
        why = "its optimizer state has the names of torchtitan"
        raise usage_error(what, why, text("remove {}", Option("training_state", True)))
    if not any(name.startswith(STATE_PREFIX) for name in tensors):
        what = f"{source.display_name} has no training state"
        why = f"no name in it starts with {STATE_PREFIX}"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    groups = _groups(folder)
    if not groups:
        raise PrepError(
            f"the settings of the optimizer in {source.display_name} are missing",
            f"no value in it starts with {GROUPS_PREFIX}",
            WITHOUT_STATE_HINT,
        )
    num_updates = _num_updates(source, tensors)
    settings = adam_settings(source.display_name, groups)
    others = tuple(entry for entry in source.extra_entries if not _is_converted(entry))
    other_parts = dict.fromkeys(_part(entry.name) for entry in others)
    other_parts |= dict.fromkeys(_other_parameters(source, tensors))
    state = ForeignState(
        moments=tuple(_moments(source, tensors)),
        # A loop of PyTorch keeps its step elsewhere, if at all.
        step=num_updates,
        num_updates=num_updates,
        settings=settings,
        left_out=(*other_parts, *decay_notes(source, _decays(groups))),
    )
    return add_foreign_state(replace(source, extra_entries=others), state)


def _is_converted(entry: DroppedTensor) -> bool:
    """Return whether an entry is a part of the training state."""
    return entry.rule == OPT_STATE_RULE or entry.name.startswith(GROUPS_PREFIX)


def _part(name: str) -> str:
    """Return the part of a checkpoint with an entry: its first key, or the whole name in the optimizer.

    >>> _part("scheduler.last_epoch"), _part("optimizer.acc_grads")
    ('scheduler', 'optimizer.acc_grads')
    """
    key, _, _ = name.partition(".")
    return name if key == OPTIMIZER else key


def _other_parameters(source: Source, tensors: Mapping[str, DcpTensor]) -> Iterator[str]:
    """Yield the optimizer states of parameters outside of the model, e.g. `optimizer.state.value_head.weight`.

    Raises:
        PrepError: A parameter of the model has the state of another optimizer.
    """
    parameters = {source.file_name(tensor) for tensor in trained_tensors(source)}
    for name in tensors:
        if not name.startswith(STATE_PREFIX):
            continue
        parameter, _, entry = name.removeprefix(STATE_PREFIX).rpartition(".")
        if parameter not in parameters:
            yield f"{STATE_PREFIX}{parameter}"
        elif entry not in (*ENTRIES, NUM_UPDATES):
            what = f"{source.display_name} has no state of AdamW"
            raise PrepError(what, f"the optimizer keeps {name}", WITHOUT_STATE_HINT)


def _moments(source: Source, tensors: Mapping[str, DcpTensor]) -> Iterator[SourceTensor]:
    """Yield the moments of all parameters, slot by slot."""
    manifest = source.manifest or NO_MANIFEST
    parameters = trained_tensors(source)
    for slot, entry in zip(MOMENTS, ENTRIES, strict=True):
        for parameter in parameters:
            name = source.file_name(parameter)
            moment = _state_tensor(source, tensors, name, entry)
            if moment.shape != parameter.shape:
                what = f"{source.display_name}: {moment.name} has another shape"
                why = f"it is {list(moment.shape)}, the parameter {list(parameter.shape)}"
                raise PrepError(what, why, GET_AGAIN_HINT)
            digests = recorded_digests(manifest.slots.get(slot, {}), name)
            yield SourceTensor(
                qualify(slot, parameter.name),
                moment.dtype,
                moment.shape,
                box_locations(moment),
                digests,
            )


def _state_tensor(
    source: Source, tensors: Mapping[str, DcpTensor], name: str, entry: str
) -> DcpTensor:
    """Return an entry of the optimizer state of a parameter."""
    full_name = f"{STATE_PREFIX}{name}.{entry}"
    if full_name not in tensors:
        why = "the parameter was frozen, or the optimizer is not AdamW"
        raise PrepError(f"{source.display_name} has no {full_name}", why, WITHOUT_STATE_HINT)
    return tensors[full_name]


def _decays(groups: Sequence[Mapping[Any, Any]]) -> dict[str, float]:
    """Return the weight decay of each parameter. Empty for groups without names of parameters."""
    decays: dict[str, float] = {}
    for group in groups:
        names = group.get("params")
        if isinstance(names, list):
            decays |= {name: group["weight_decay"] for name in names if isinstance(name, str)}
    return decays


def _num_updates(source: Source, tensors: Mapping[str, DcpTensor]) -> int:
    """Return the number of updates. All parameters have the same one."""
    counts: dict[str, float] = {}
    for parameter in trained_tensors(source):
        name = source.file_name(parameter)
        step = _state_tensor(source, tensors, name, NUM_UPDATES)
        scalar = SourceTensor(step.name, step.dtype, step.shape, box_locations(step))
        counts[name] = read_scalar(source, scalar)
    return one_count(source, counts)


def _groups(folder: DcpFolder) -> list[Mapping[Any, Any]]:
    """Return the parameter groups of the optimizer.

    Values are stored one by one, e.g. as `optimizer.param_groups.0.lr`, or as `optimizer.param_groups.TENSOR.lr` in a
    flattened state dict. Lists without tensors are stored as one value.
    """
    groups: dict[str, dict[str, object]] = {}
    for name in folder.archives:
        prefix, _, key = name.rpartition(".")
        if prefix.startswith(f"{GROUPS_PREFIX}.") and key in GROUP_KEYS:
            owner = prefix.removeprefix(f"{GROUPS_PREFIX}.")
            group = groups.setdefault(owner, {"params": [owner]})
            group[key] = read_dcp_value(folder, name)
    if GROUPS_PREFIX in folder.archives:
        value = read_dcp_value(folder, GROUPS_PREFIX)
        if isinstance(value, list):
            return [group for group in value if isinstance(group, dict)]
    return list(groups.values())
