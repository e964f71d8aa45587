"""Read the state of `torch.optim.AdamW`: a checkpoint of transformers' Trainer, or a torch distributed checkpoint.

Trainer has the optimizer's state dict in optimizer.pt and its step in trainer_state.json. A torch distributed
checkpoint is read in the form of `get_state_dict` of PyTorch, with names such as `optimizer.state.TENSOR.exp_avg`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text, usage_error
from prepcli.engine.digest import record_digest_of_pieces
from prepcli.formats.manifest import NO_MANIFEST, bytes_between
from prepcli.formats.torch_dcp import DcpFolder, read_dcp_folder, read_dcp_value
from prepcli.formats.torch_files import TorchObject, read_torch_object
from prepcli.models.module_order import module_order, optimizer_groups
from prepcli.models.param_tree import DecayRule, param_leaves
from prepcli.planning.arrays import Array
from prepcli.planning.libraries import AdamNumbers, AdamSettings, find_marked_library
from prepcli.planning.plan import SourceFile
from prepcli.planning.tensors import MOMENTS, OPT_STATE_RULE, qualify
from prepcli.sources.adam_state import (
    MAX_COUNT,
    WITHOUT_STATE_HINT,
    add_training_state,
    check_count,
    read_scalars,
    trained_tensors,
)
from prepcli.sources.openers.tensor_files import STATE_PREFIX, with_state_names
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import (
    SCHEDULER_FILE,
    Source,
    SourceTensor,
    match_source_tensors,
    read_json_object,
    recorded_digests,
    stored_rows,
    stored_tensor,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.stores.paths import AnyPath

OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
# trainer_state.json has a line of about 200 bytes for each logged step.
MAX_TRAINER_STATE_NBYTES = 128 << 20
# Files with state that no other library has a place for.
OTHER_FILES = ("rng_state.pth", "scaler.pt", "training_args.bin", SCHEDULER_FILE)
# Entries of a parameter: the moments in the order of MOMENTS, and the number of updates.
ENTRIES = ("exp_avg", "exp_avg_sq")
STEP_ENTRY = "step"
OPTIMIZER = "optimizer"
GROUPS_PREFIX = f"{OPTIMIZER}.param_groups"
BETAS = ("b1", "b2")
# Settings with one value for all parameters.
SHARED_KEYS = ("lr", *BETAS, "eps")
# Keys of a group of parameters that are read.
GROUP_KEYS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay"),
    *("amsgrad", "maximize", "decoupled_weight_decay", "params"),
)
# Rule of a recipe without keys for weight decay.
DEFAULT_RULE = DecayRule()

Group = Mapping[Any, Any]


def read_trainer_checkpoint(source: Source) -> Source:
    """Return a Hugging Face folder with the training state in the other files of a checkpoint of Trainer.

    Args:
        source: The opened folder.

    Raises:
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    paths = [source.root / name for name in OPTIMIZER_FILES if (source.root / name).is_file()]
    if not paths:
        why = f"it has no {OPTIMIZER_FILES[0]}"
        if source.manifest is not None and OPTIMIZER_FILES[0] in source.manifest.files:
            raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
        what = f"{source.display_name} has no training state"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    path = paths[0]
    optimizer = read_torch_object(path)
    entries, groups = _state_dict(path, optimizer)
    keys = _parameter_keys(source, path, groups)
    tensors = dict(_named_entries(path, entries, keys))
    # The file follows those of the source.
    file_number = len(source.byte_sources)
    readable = replace(source, blobs=(*source.byte_sources, path))
    steps = _archived_entries(tensors, STEP_ENTRY, "the step", file_number)
    moments = [_archived_entries(tensors, entry, entry, file_number) for entry in ENTRIES]
    state_path = source.root / TRAINER_STATE_FILE
    step = read_json_object(state_path, MAX_TRAINER_STATE_NBYTES).get("global_step")
    if type(step) is not int or not 0 <= step <= MAX_COUNT:
        why = f"global_step is {step!r:.40}"
        raise DamagedError(f"{state_path} is broken", why, GET_AGAIN_HINT)
    numbers = AdamNumbers(
        step=step,
        settings=_read_settings(str(path), groups),
        num_updates=_num_updates(readable, steps),
    )
    decayed: list[str] = []
    for group in groups:
        if group["weight_decay"]:
            decayed += [keys[key] for key in group["params"]]
    others = [name for name in OTHER_FILES if (source.root / name).is_file()]
    # Shapes are checked before the file is read for its digest.
    moment_tensors = tuple(_moments(source, str(path), moments))
    metadata_digest = optimizer.digest
    if source.manifest is not None:
        # The bytes outside of the moments, which have digests of their own.
        ranges: list[tuple[int, int]] = []
        for entries in tensors.values():
            for entry in ENTRIES:
                moment = entries[entry]
                ranges.append((moment.offset, moment.offset + moment.nbytes))
        metadata_digest = record_digest_of_pieces(bytes_between(path, sorted(ranges)))
    return add_training_state(
        source,
        numbers,
        moment_tensors,
        (*others, *decay_differences(source, decayed)),
        files=(path,),
        stamps=(SourceFile(path.name, optimizer.size, optimizer.mtime_ns, metadata_digest),),
    )


def read_dcp_state(source: Source) -> Source:
    """Return a torch distributed checkpoint with its training state.

    Raises:
        UsageError: The checkpoint is one of torchtitan.
        PrepError: There is none, it is damaged, or it is no state of AdamW with the moments of all parameters.
    """
    folder = with_state_names(read_dcp_folder(source.root))
    tensors = {tensor.name: tensor for tensor in folder.tensors}
    name = source.display_name
    library = find_marked_library(tensors)
    if library is not None:
        option = Option("training_state", True)
        why = f"its optimizer state has the names of {library.layouts[0]}"
        what = text("{} is not supported for {}", option, name)
        raise usage_error(what, why, text("remove {}", option))
    if not any(tensor.startswith(STATE_PREFIX) for tensor in tensors):
        why = f"no name in it starts with {STATE_PREFIX}"
        raise PrepError(f"{name} has no training state", why, WITHOUT_STATE_HINT)
    groups = _dcp_groups(folder)
    if not groups:
        what = f"the settings of the optimizer in {name} are missing"
        why = f"no value in it starts with {GROUPS_PREFIX}"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    names = [source.file_name(parameter) for parameter in trained_tensors(source)]
    num_updates = _num_updates(source, _dcp_entries(source, names, tensors, STEP_ENTRY))
    settings = _read_settings(name, groups)
    others = tuple(
        entry
        for entry in source.extra_entries
        if entry.rule != OPT_STATE_RULE and not entry.name.startswith(GROUPS_PREFIX)
    )
    left_out = dict.fromkeys(_part(entry.name) for entry in others)
    # E.g. `optimizer.state.value_head.weight`, the state of a parameter outside of the model.
    for state_name in tensors:
        if not state_name.startswith(STATE_PREFIX):
            continue
        parameter, _, entry = state_name.removeprefix(STATE_PREFIX).rpartition(".")
        if parameter not in names:
            left_out[f"{STATE_PREFIX}{parameter}"] = None
        elif entry not in (*ENTRIES, STEP_ENTRY):
            what = f"{source.display_name} has no state of AdamW"
            raise PrepError(what, f"the optimizer keeps {state_name}", WITHOUT_STATE_HINT)
    # Groups without names of parameters have no decayed ones.
    decays: dict[str, float] = {}
    for group in groups:
        for name_or_number in group["params"] if isinstance(group.get("params"), list) else ():
            if isinstance(name_or_number, str):
                decays[name_or_number] = group["weight_decay"]
    decayed = [parameter for parameter, decay in decays.items() if decay]
    left_out |= dict.fromkeys(decay_differences(source, decayed))
    moments = [_dcp_entries(source, names, tensors, entry) for entry in ENTRIES]
    return add_training_state(
        replace(source, extra_entries=others),
        # A loop of PyTorch keeps its step elsewhere, if at all.
        AdamNumbers(step=num_updates, num_updates=num_updates, settings=settings),
        tuple(_moments(source, name, moments)),
        tuple(left_out),
    )


def _num_updates(source: Source, steps: Mapping[str, SourceTensor]) -> int:
    """Return the number of updates. All parameters have the same one."""
    counts = read_scalars(source, [*steps.values()])
    first_names: dict[float, str] = {}
    for name, count in zip(steps, counts, strict=True):
        check_count(source, count, f"{name} has {count:g} updates")
        first_names.setdefault(count, name)
    if len(first_names) > 1:
        pairs = list(first_names.items())[:2]
        listed = ", ".join(f"{count:g} of {name}" for count, name in pairs)
        what = f"{source.display_name} has several numbers of updates"
        why = f"{listed}. prep has one number for all parameters"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    return int(counts[0])


def _moments(
    source: Source, where: str, moments: Sequence[Mapping[str, SourceTensor]]
) -> Iterator[SourceTensor]:
    """Yield the moments of all parameters with their names in prep. `where` is the checkpoint in messages."""
    manifest = source.manifest or NO_MANIFEST
    parameters = {source.file_name(tensor): tensor for tensor in source.tensors}
    for slot, tensors in zip(MOMENTS, moments, strict=True):
        records = manifest.slots.get(slot, {})
        for name, moment in tensors.items():
            parameter = parameters[name]
            if moment.shape != parameter.shape:
                why = f"it is {list(moment.shape)}, the parameter {list(parameter.shape)}"
                what = f"{where}: {moment.name} has another shape"
                raise PrepError(what, why, GET_AGAIN_HINT)
            digests = recorded_digests(records, name)
            yield replace(moment, name=qualify(slot, parameter.name), digests=digests)


def _read_settings(name: str, groups: Sequence[Group]) -> AdamSettings:
    """Return the settings in the parameter groups of `torch.optim.AdamW`. `name` is the checkpoint in messages.

    The weight decay is the largest one: the group of norms and biases has none.
    """
    what = f"the settings of the optimizer in {name} are not supported"
    shared: dict[str, float] = {}
    for key in SHARED_KEYS:
        values = [_setting(what, group, key) for group in groups]
        if len(set(values)) != 1:
            listed = " and ".join(f"{value:g}" for value in dict.fromkeys(values))
            why = f"{key} is {listed}, and prep has one for all parameters"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
        shared[key] = values[0]
    peak_lr = shared["lr"]
    if "initial_lr" in groups[0]:
        peak_lr = _setting(what, groups[0], "initial_lr")
    weight_decay = max(_setting(what, group, "weight_decay") for group in groups)
    for group in groups:
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise PrepError(what, f"{key} is set", WITHOUT_STATE_HINT)
        if weight_decay and group.get("decoupled_weight_decay") is False:
            why = "its weight decay is a part of the gradient, as in Adam. prep continues AdamW"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    return AdamSettings(**shared, peak_lr=peak_lr, weight_decay=weight_decay)


def _setting(what: str, group: Group, key: str) -> float:
    """Return a setting of a group. `b1` and `b2` are the two `betas`."""
    if key in BETAS:
        betas = group.get("betas")
        value = None
        if isinstance(betas, list | tuple) and len(betas) == len(BETAS):
            value = betas[BETAS.index(key)]
    else:
        value = group.get(key)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    why = f"{key} is not a number"
    if key not in BETAS and key not in group:
        why = f"{key} is missing"
    raise PrepError(what, why, WITHOUT_STATE_HINT)


def decay_differences(
    source: Source, decayed_names: Collection[str], rule: DecayRule = DEFAULT_RULE
) -> tuple[str, ...]:
    """Return a description of the parameters with weight decay on one side only. Empty without weight decay.

    Args:
        source: The opened source.
        decayed_names: Names in files of the parameters with weight decay in torch.
        rule: The rule of the recipe.
    """
    if not decayed_names:
        return ()
    match = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    manifest = source.tree_manifest
    leaves = param_leaves(
        source.family,
        source.config,
        match.is_tied,
        scan=manifest.scan,
        scan_axis=manifest.scan_axis,
    )
    decayed_in_prep: set[str] = set()
    for tensor in source.tensors:
        for use in match.uses.get(tensor.name, ()):
            if rule.decays(leaves[use.path]):
                decayed_in_prep.add(source.file_name(tensor))
    differing = sorted(decayed_in_prep ^ {*decayed_names})
    if not differing:
        return ()
    return (f"weight decay of {len(differing):,} parameters, e.g. {differing[0]}",)


# --- optimizer.pt and trainer_state.json of Trainer ---


def _state_dict(path: AnyPath, optimizer: TorchObject) -> tuple[Group, Sequence[Group]]:
    """Return `state` and `param_groups` of the optimizer's state dict."""

    def is_group(value: object) -> bool:
        keys = value.get("params") if isinstance(value, dict) else None
        return isinstance(keys, list) and all(isinstance(key, int | str) for key in keys)

    root = optimizer.root
    if isinstance(root, dict):
        entries = root.get("state")
        groups = root.get("param_groups")
        if isinstance(entries, dict) and isinstance(groups, list) and all(map(is_group, groups)):
            return entries, groups
    what = f"{path} is no state of an optimizer"
    raise DamagedError(what, "it lacks state or param_groups", GET_AGAIN_HINT)


def _parameter_keys(
    source: Source, path: AnyPath, groups: Sequence[Group]
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
    path: AnyPath, entries: Group, keys: Mapping[int | str, str]
) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Yield the name of each parameter and its entries."""
    for key, name in keys.items():
        entry = entries.get(key)
        if not isinstance(entry, dict):
            why = "the parameter was frozen, or the optimizer has taken no step"
            raise PrepError(f"{path} has no moments of {name}", why, WITHOUT_STATE_HINT)
        tensors = {key: value for key, value in entry.items() if isinstance(value, Array)}
        if tensors.keys() != {*ENTRIES, STEP_ENTRY}:
            why = f"the state of {name} is {', '.join(map(str, entry))}"
            what = f"{path} is no state of AdamW"
            raise PrepError(what, why, "train with the optimizer adamw_torch")
        yield name, tensors
    unknown = [key for key in entries if key not in keys]
    if unknown:
        why = f"no group of parameters has the key {unknown[0]}"
        raise DamagedError(f"{path} has unused moments", why, GET_AGAIN_HINT)


def _archived_entries(
    tensors: Mapping[str, Mapping[str, Array]], entry: str, label: str, file_number: int
) -> dict[str, SourceTensor]:
    """Return one entry of all parameters as tensors in a file, by the name of the parameter."""
    entries: dict[str, SourceTensor] = {}
    for name, values in tensors.items():
        value = values[entry]
        location = value.in_file(file_number)
        entries[name] = SourceTensor(f"{label} of {name}", value.dtype, value.shape, (location,))
    return entries


# --- Torch distributed checkpoints ---


def _part(name: str) -> str:
    """Return the part of a checkpoint with an entry: its first key, or the whole name in the optimizer.

    >>> _part("scheduler.last_epoch"), _part("optimizer.acc_grads")
    ('scheduler', 'optimizer.acc_grads')
    """
    key, _, _ = name.partition(".")
    return name if key == OPTIMIZER else key


def _dcp_entries(
    source: Source, parameters: Collection[str], tensors: Mapping[str, Array], entry: str
) -> dict[str, SourceTensor]:
    """Return one entry of all parameters, by the name of the parameter."""
    entries: dict[str, SourceTensor] = {}
    for parameter in parameters:
        name = f"{STATE_PREFIX}{parameter}.{entry}"
        if name not in tensors:
            why = "the parameter was frozen, or the optimizer is not AdamW"
            raise PrepError(f"{source.display_name} has no {name}", why, WITHOUT_STATE_HINT)
        entries[parameter] = stored_tensor(tensors[name])
    return entries


def _dcp_groups(folder: DcpFolder) -> list[Group]:
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
