"""Layouts of PyTorch: torch distributed checkpoints, and the state of AdamW in them or in Trainer's files.

Trainer: `_save_optimizer_and_scheduler` in trainer.py and `TrainerState` in trainer_callback.py of transformers 5, and
the state dicts of `AdamW` and `LambdaLR` of PyTorch 2. Distributed: the keys of `{"model": ..., "optimizer": ...}` with
the two results of `torch.distributed.checkpoint.state_dict.get_state_dict`. `sources.torch_state` reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.safetensors import LayoutEntry, split_into_shards
from prepcli.formats.torch_archive import encode_object
from prepcli.formats.torch_dcp import (
    DATA_FILE,
    MAX_METADATA_OPCODES,
    METADATA_FILE,
    DcpEntry,
    encode_metadata,
)
from prepcli.formats.torch_pickle import MAX_NBYTES, SUPPORTED_DTYPES, PickledValue, StoredTensor
from prepcli.models.module_order import OptimizerGroups, optimizer_groups
from prepcli.planning.arrays import Array, Locations, MappedArray, whole_array
from prepcli.planning.libraries import AdamSettings
from prepcli.planning.plan import OutputFile, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.sources.adam_state import AdamState, moment_names, require_settings
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import SCHEDULER_FILE, Source
from prepcli.sources.torch_state import ENTRIES, OPTIMIZER_FILES, STEP_ENTRY, decay_differences
from prepcli.targets.hf_folder import json_bytes
from prepcli.targets.planner import Draft, Placed
from prepcli.targets.safetensors_folder import header_entries, place_safetensors
from prepcli.targets.trees import find_layout_leaves

# A tensor takes up to 77 opcodes of `.metadata`: a moment has four keys.
MAX_TENSORS = MAX_METADATA_OPCODES // 80
ZERO_DTYPE = "float32"
# Keys of a distributed checkpoint.
MODEL = "model"
OPTIMIZER = "optimizer"
# Fields of `TrainerControl`, which Trainer updates in each save. It decides anew after each step.
CONTROL_FLAGS = dict.fromkeys(
    (
        "should_training_stop",
        "should_epoch_stop",
        "should_save",
        "should_evaluate",
        "should_log",
    ),
    False,
)
# The groups with and without weight decay.
NUM_GROUPS = 2


@dataclass(frozen=True, slots=True)
class DcpConstant:
    """A small value in the state dict, with its keys and its complete archive."""

    path: tuple[str | int, ...]
    value: PickledValue

    def entry(self, file: str, offset: int, length: int) -> DcpEntry:
        """Return the entry in the metadata."""
        name = ".".join(map(str, self.path))
        dtype = ""
        shape: tuple[int, ...] = ()
        if isinstance(self.value, StoredTensor):
            dtype = self.value.dtype
            shape = self.value.shape
        return DcpEntry(name, dtype, shape, file, offset, length, self.path)


def place_dcp_entries(
    entries: Sequence[LayoutEntry],
    shard_nbytes: int,
    *,
    paths: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    constants: Sequence[DcpConstant] = (),
) -> Placed:
    """Place tensors in the files of a torch distributed checkpoint."""
    files: list[OutputFile] = []
    locations: dict[str, Locations] = {}
    dcp_entries: list[DcpEntry] = []
    for number, (_, group) in enumerate(split_into_shards(entries, shard_nbytes)):
        file_name = DATA_FILE.format(number)
        ranges: list[tuple[int, bytes]] = []
        offset = 0
        for name, dtype, shape, _ in group:
            if dtype not in SUPPORTED_DTYPES:
                hint = text("use {}", Option("format", "safetensors"))
                raise PrepError(f"{name} is {dtype}", "prep writes no such tensor in DCP", hint)
            archive = encode_object(StoredTensor("0", dtype, shape))
            ranges += [(offset + start, data) for start, data in archive.constant_ranges]
            position = (number, offset + archive.offsets["0"])
            locations[name] = (whole_array(name, dtype, shape, position),)
            path = paths.get(name, ())
            dcp_entries.append(
                DcpEntry(name, dtype, shape, file_name, offset, archive.nbytes, path)
            )
            offset += archive.nbytes
        files.append(OutputFile(file_name, offset, constant_ranges=tuple(ranges)))
    if constants:
        # A file of complete archives
        file_name = DATA_FILE.format(len(files))
        content = bytearray()
        for constant in constants:
            ((_, data),) = encode_object(constant.value).constant_ranges
            dcp_entries.append(constant.entry(file_name, len(content), len(data)))
            content += data
        whole = ((0, bytes(content)),)
        files.append(OutputFile(file_name, len(content), constant_ranges=whole))
    metadata = SmallFile(METADATA_FILE, encode_metadata(dcp_entries))
    if len(dcp_entries) > MAX_TENSORS or len(metadata.content) > MAX_NBYTES:
        why = f"prep reads the metadata of up to {MAX_TENSORS:,} tensors in {MAX_NBYTES >> 20} MiB"
        hint = text("use {}", Option("format", "safetensors"))
        raise PrepError(f"{len(dcp_entries):,} tensors are too many for DCP", why, hint)
    return Placed(files=tuple(files), locations=locations, index=(metadata,))


def place_dcp(draft: Draft, shard_nbytes: int) -> Placed:
    """Place the tensors of a draft in a torch distributed checkpoint, under the names of Hugging Face."""
    entries = header_entries(draft.source, draft.tensors, rows=draft.row_counts)
    placed = place_dcp_entries(entries, shard_nbytes)
    locations: dict[str, Locations] = {}
    for tensor in draft.tensors:
        locations[tensor.name] = placed.locations[draft.source.file_name(tensor)]
    return replace(placed, locations=locations)


def place_dcp_tree(draft: Draft, tree: str, shard_nbytes: int) -> Placed:
    """Place the tensors of a draft in a torch distributed checkpoint, under the names of another library."""
    dtypes = {tensor.name: tensor.dtype for tensor in draft.tensors}
    leaves = find_layout_leaves(draft, tree)
    entries: dict[str, LayoutEntry] = {}
    for name, uses in leaves.items():
        dtype = dtypes[name]
        for use in uses:
            shape = use.axis_map.leaf_shape
            nbytes = math.prod(shape) * itemsize(dtype)
            entries[use.path] = (use.path, dtype, shape, nbytes)
    constants = _zero_leaves(draft.source, tree)
    placed = place_dcp_entries([*entries.values()], shard_nbytes, constants=constants)
    locations: dict[str, Locations] = {}
    for name, uses in leaves.items():
        for use in uses:
            (place,) = placed.locations[use.path]
            assert isinstance(place, Array)
            location = MappedArray(use.axis_map, use.stacked_indices, place)
            locations[name] = (*locations.get(name, ()), location)
    return replace(placed, locations=locations)


def _zero_leaves(source: Source, layout: str) -> list[DcpConstant]:
    """Return the leaves of a layout without a tensor."""
    sizes = source.family.sizes(source.config)
    constants: list[DcpConstant] = []
    for path, dims in source.family.layouts[layout].zero_leaves.items():
        shape = tuple(sizes[dim] for dim in dims)
        zeros = bytes(math.prod(shape) * itemsize(ZERO_DTYPE))
        for layer in range(sizes[LAYERS]):
            value = StoredTensor("0", ZERO_DTYPE, shape, zeros)
            constants.append(DcpConstant((path.format(**{LAYERS: layer}),), value))
    return constants


@dataclass(frozen=True, slots=True)
class TorchAdam:
    """A state of AdamW with its parameters in the output.

    Attributes:
        state: The training state.
        settings: Settings of the optimizer.
        groups: Names in files of the parameters with and without weight decay.
        names: Name in the source of each parameter, by its name in files.
        parameters: Entries of the parameters in the output.
        moments: Entries of both moments, by the parameter's name in files. A tied head has none.
    """

    state: AdamState
    settings: AdamSettings
    groups: OptimizerGroups
    names: Mapping[str, str]
    parameters: Sequence[LayoutEntry]
    moments: Mapping[str, Sequence[LayoutEntry]]

    @property
    def step_content(self) -> bytes:
        """The number of updates of a parameter."""
        return np.float32(self.state.num_updates).tobytes()

    def decay_differences(self, source: Source) -> tuple[str, ...]:
        """Return a description of the parameters with weight decay only in the recipe or only in torch."""
        if self.state.decay_rule is None or not self.settings.weight_decay:
            return ()
        return decay_differences(source, self.groups.decayed, self.state.decay_rule)


def prepare_torch_adam(draft: Draft) -> TorchAdam:
    """Return the training state of a draft with the names and shapes of the output.

    Raises:
        PrepError: The order of the parameters in torch is unknown, or the source has no settings of its optimizer.
    """
    source = draft.source
    state = draft.state
    assert state is not None
    entries = header_entries(source, draft.tensors, rows=draft.row_counts)
    names = {source.file_name(parameter): parameter.name for parameter in draft.tensors}
    moments: dict[str, list[LayoutEntry]] = {}
    for file_name, _, shape, _ in entries:
        name = names[file_name]
        if name not in state.first:
            continue
        moments[file_name] = []
        pair = (state.first[name], state.second[name])
        for moment, tensor in zip(moment_names(name), pair, strict=True):
            nbytes = math.prod(shape) * itemsize(tensor.dtype)
            moments[file_name].append((moment, tensor.dtype, shape, nbytes))
    groups = optimizer_groups(source.family.name, moments)
    settings = require_settings(source, state)
    return TorchAdam(state, settings, groups, names, entries, moments)


def place_trainer_checkpoint(draft: Draft, adam: TorchAdam, shard_nbytes: int) -> Placed:
    """Place parameters and training state in the files of a checkpoint of Trainer."""
    placed = place_safetensors(draft, shard_nbytes)
    groups = adam.groups
    entries: dict[int, PickledValue] = {}
    stored: dict[str, StoredTensor] = {}
    for number, name in enumerate(groups.numbered):
        step = StoredTensor(f"{number}.0", "float32", (), adam.step_content)
        entry: dict[str, PickledValue] = {STEP_ENTRY: step}
        for key, (moment, dtype, shape, _) in zip(ENTRIES, adam.moments[name], strict=True):
            if dtype not in SUPPORTED_DTYPES:
                hint = text("export it without {}", Option("training_state", True))
                why = "a PyTorch file of prep has no such dtype"
                raise PrepError(f"moments are {dtype}", why, hint)
            stored[moment] = StoredTensor(f"{number}.{len(entry)}", dtype, shape)
            entry[key] = stored[moment]
        entries[number] = entry
    numbers = list(range(len(groups.numbered)))
    num_decayed = len(groups.decayed)
    param_groups = _parameter_groups(adam, numbers[:num_decayed], numbers[num_decayed:])
    archive = encode_object({"state": entries, "param_groups": param_groups})
    file = OutputFile(OPTIMIZER_FILES[0], archive.nbytes, constant_ranges=archive.constant_ranges)
    locations = dict(placed.locations)
    for moment, tensor in stored.items():
        position = (len(placed.files), archive.offsets[tensor.key])
        array = whole_array(moment, tensor.dtype, tensor.shape, position)
        locations[moment] = (array,)
    return replace(
        placed,
        files=(*placed.files, file),
        locations=locations,
        index=(*placed.index, _scheduler_file(adam), _trainer_state_file(adam.state)),
    )


def place_dcp_state(adam: TorchAdam, shard_nbytes: int) -> Placed:
    """Place parameters and training state in a torch distributed checkpoint."""
    # Keys in the nested state dict -> entry with the name in the source.
    by_path: dict[tuple[str, ...], LayoutEntry] = {}
    constants: list[DcpConstant] = []
    for file_name, dtype, shape, nbytes in adam.parameters:
        by_path[MODEL, file_name] = (adam.names[file_name], dtype, shape, nbytes)
    for file_name, pair in adam.moments.items():
        for key, entry in zip(ENTRIES, pair, strict=True):
            by_path[OPTIMIZER, "state", file_name, key] = entry
        step = StoredTensor("0", "float32", (), adam.step_content)
        constants.append(DcpConstant((OPTIMIZER, "state", file_name, STEP_ENTRY), step))
    groups = adam.groups
    pair = _parameter_groups(adam, list(groups.decayed), list(groups.not_decayed))
    for number, group in enumerate(pair):
        for key, value in group.items():
            constants.append(DcpConstant((OPTIMIZER, "param_groups", number, key), value))
    paths = {".".join(path): path for path in by_path}
    entries = [(".".join(path), *entry[1:]) for path, entry in by_path.items()]
    placed = place_dcp_entries(entries, shard_nbytes, paths=paths, constants=constants)
    locations: dict[str, Locations] = {}
    for path, (name, *_) in by_path.items():
        locations[name] = placed.locations[".".join(path)]
    return replace(placed, locations=locations)


def _parameter_groups(
    adam: TorchAdam, decayed: PickledValue, not_decayed: PickledValue
) -> list[dict[str, PickledValue]]:
    """Return both groups of parameters, given the numbers or names of the parameters in each."""
    settings = adam.settings
    groups: list[dict[str, PickledValue]] = []
    for weight_decay, parameters in ((settings.weight_decay, decayed), (0.0, not_decayed)):
        # The keys of `torch.optim.AdamW`, in their order. None of the implementations (foreach, fused) is chosen, so
        # PyTorch chooses one for the devices.
        group: dict[str, PickledValue] = {
            "weight_decay": weight_decay,
            "lr": settings.lr,
            "betas": (settings.b1, settings.b2),
            "eps": settings.eps,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "initial_lr": settings.peak_lr,
            "params": parameters,
        }
        groups.append(group)
    return groups


def _scheduler_file(adam: TorchAdam) -> SmallFile:
    """Return the state of `LambdaLR`. Trainer makes the function of the schedule from its own arguments."""
    step = adam.state.step
    archive = encode_object(
        {
            "base_lrs": [adam.settings.peak_lr] * NUM_GROUPS,
            "last_epoch": step,
            "_step_count": step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [adam.settings.lr] * NUM_GROUPS,
            "lr_lambdas": [{} for _ in range(NUM_GROUPS)],
        }
    )
    ((_, content),) = archive.constant_ranges
    return SmallFile(SCHEDULER_FILE, content)


def _trainer_state_file(state: AdamState) -> SmallFile:
    """Return trainer_state.json.

    Trainer computes the epoch from the step and its own data. It warns if `train_batch_size` is not its batch size.
    """
    fields = {
        "epoch": 0,
        "global_step": state.step,
        "log_history": [],
        "stateful_callbacks": {"TrainerControl": {"args": CONTROL_FLAGS, "attributes": {}}},
        "train_batch_size": state.batch_size,
    }
    return SmallFile(TRAINER_STATE_FILE, json_bytes(fields))
