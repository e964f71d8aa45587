"""Read the training state of a torch distributed checkpoint, in the form of `get_state_dict` of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from prepcli.errors import GET_AGAIN_HINT, PrepError
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_dcp import DcpFolder, DcpTensor, read_dcp_folder, read_dcp_value
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import OPT_STATE_RULE, qualify
from prepcli.sources.adam_state import MOMENTS, AdamSettings, read_scalar
from prepcli.sources.foreign_state import (
    WITHOUT_STATE_HINT,
    ForeignState,
    add_foreign_state,
    one_count,
)
from prepcli.sources.openers.dcp_folder import STATE_PREFIX, box_locations
from prepcli.sources.source import Source, SourceTensor, recorded_digests
from prepcli.sources.trainer_checkpoint import ENTRIES, NUM_UPDATES, parameter_names

GROUPS_PREFIX = "optimizer.param_groups"
# Settings of a group, by the fields of `AdamSettings`. The first ones are equal in all groups.
SHARED_KEYS = ("lr", "betas", "eps")
GROUP_KEYS = (*SHARED_KEYS, "weight_decay", "initial_lr")


def read_dcp_state(source: Source) -> Source:
    """Return a torch distributed checkpoint with its training state.

    Raises:
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    folder = read_dcp_folder(source.root)
    tensors = {tensor.name: tensor for tensor in folder.tensors}
    if not any(name.startswith(STATE_PREFIX) for name in tensors):
        what = f"{source.display_name} has no training state"
        why = f"no name in it starts with {STATE_PREFIX}"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    num_updates = _num_updates(source, tensors)
    state = ForeignState(
        moments=tuple(_moments(source, tensors)),
        # A loop of PyTorch keeps its step elsewhere, if at all.
        step=num_updates,
        num_updates=num_updates,
        settings=_settings(source, folder),
        left_out=(),
    )
    others = tuple(entry for entry in source.extra_entries if not _is_converted(entry))
    return add_foreign_state(replace(source, extra_entries=others), state)


def _is_converted(entry: DroppedTensor) -> bool:
    """Return whether an entry is a part of the training state."""
    return entry.rule == OPT_STATE_RULE or entry.name.startswith(GROUPS_PREFIX)


def _moments(source: Source, tensors: Mapping[str, DcpTensor]) -> Iterator[SourceTensor]:
    """Yield the moments of all parameters, slot by slot."""
    manifest = source.manifest or NO_MANIFEST
    parameters = {source.file_name(tensor): tensor for tensor in source.tensors}
    for slot, entry in zip(MOMENTS, ENTRIES, strict=True):
        for name in parameter_names(source):
            moment = _state_tensor(source, tensors, name, entry)
            if moment.shape != parameters[name].shape:
                what = f"{source.display_name}: {moment.name} has another shape"
                why = f"it is {list(moment.shape)}, the parameter {list(parameters[name].shape)}"
                raise PrepError(what, why, GET_AGAIN_HINT)
            digests = recorded_digests(manifest.slots.get(slot, {}), name)
            yield SourceTensor(
                qualify(slot, parameters[name].name),
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


def _num_updates(source: Source, tensors: Mapping[str, DcpTensor]) -> int:
    """Return the number of updates. All parameters have the same one."""
    counts: dict[str, float] = {}
    for name in parameter_names(source):
        step = _state_tensor(source, tensors, name, NUM_UPDATES)
        scalar = SourceTensor(step.name, step.dtype, step.shape, box_locations(step))
        counts[name] = read_scalar(source, scalar)
    return one_count(source, counts)


def _settings(source: Source, folder: DcpFolder) -> AdamSettings:
    """Return the settings of all groups, and the weight decay of the first group."""
    values: dict[str, list[Any]] = {key: [] for key in GROUP_KEYS}
    # `optimizer.param_groups.0.lr`, or `optimizer.param_groups.TENSOR.lr` if the state dict is flattened.
    for name in folder.archives:
        key = name.rpartition(".")[2]
        if name.startswith(f"{GROUPS_PREFIX}.") and key in values:
            values[key].append(read_dcp_value(folder, name))
    if GROUPS_PREFIX in folder.archives:
        for group in _as_groups(read_dcp_value(folder, GROUPS_PREFIX)):
            for key in values.keys() & group.keys():
                values[key].append(group[key])
    for key in SHARED_KEYS:
        if not values[key] or any(value != values[key][0] for value in values[key]):
            what = f"the settings of the optimizer in {source.display_name} are not supported"
            why = f"{key} is {values[key][:2]}, and prep has one value"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    lr = float(values["lr"][0])
    b1, b2 = values["betas"][0]
    return AdamSettings(
        lr=lr,
        peak_lr=float((values["initial_lr"] or [lr])[0]),
        b1=float(b1),
        b2=float(b2),
        eps=float(values["eps"][0]),
        weight_decay=float(max(values["weight_decay"], default=0.0)),
    )


def _as_groups(value: object) -> list[dict[str, Any]]:
    """Return the groups of a list in one stored value."""
    if not isinstance(value, list):
        return []
    return [group for group in value if isinstance(group, dict)]
