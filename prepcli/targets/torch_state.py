"""The state of `torch.optim.AdamW` in an export: a checkpoint of transformers' Trainer, or a torch distributed one.

Trainer: `_save_optimizer_and_scheduler` in trainer.py and `TrainerState` in trainer_callback.py of transformers 5, and
the state dicts of `AdamW` and `LambdaLR` of PyTorch 2. Distributed: the keys of `{"model": ..., "optimizer": ...}` with
the two results of `torch.distributed.checkpoint.state_dict.get_state_dict`. `sources.torch_state` reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.safetensors_layout import LayoutEntry
from prepcli.formats.torch_pickle import SUPPORTED_DTYPES, PickledValue, StoredTensor
from prepcli.formats.torch_zip import encode_object
from prepcli.models.module_order import OptimizerGroups, optimizer_groups
from prepcli.planning.arrays import Array, Locations, whole_array
from prepcli.planning.libraries import AdamSettings
from prepcli.planning.plan import OutputFile, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.sources.adam_state import AdamState, moment_names, require_settings
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import SCHEDULER_FILE, Source, SourceTensor
from prepcli.sources.torch_state import ENTRIES, OPTIMIZER_FILES, STEP_ENTRY, decay_differences
from prepcli.targets.dcp_folder import DcpConstant, DcpLayout, lay_out_dcp_folder
from prepcli.targets.hf_folder import header_entries, json_bytes

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


def prepare_torch_adam(
    source: Source,
    parameters: Sequence[SourceTensor],
    state: AdamState,
    row_counts: Mapping[str, int],
) -> TorchAdam:
    """Return the training state of a source with the names and shapes of the output.

    Args:
        source: The opened source.
        parameters: The parameters to write.
        state: The training state.
        row_counts: Rows of each parameter in the output.

    Raises:
        PrepError: The order of the parameters in torch is unknown, or the source has no settings of its optimizer.
    """
    entries = header_entries(source, parameters, rows=row_counts)
    names = {source.file_name(parameter): parameter.name for parameter in parameters}
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


def lay_out_trainer_state(
    adam: TorchAdam, file_number: int
) -> tuple[OutputFile, dict[str, Array], tuple[SmallFile, ...]]:
    """Lay out the files of Trainer with a training state.

    Args:
        adam: The state.
        file_number: Number of optimizer.pt in the output.

    Returns:
        The file optimizer.pt, the location of each moment by its name in the source, and the small files.

    Raises:
        PrepError: PyTorch has no such dtype.
    """
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
    locations: dict[str, Array] = {}
    for moment, tensor in stored.items():
        position = (file_number, archive.offsets[tensor.key])
        locations[moment] = whole_array(moment, tensor.dtype, tensor.shape, position)
    return file, locations, (_scheduler_file(adam), _trainer_state_file(adam.state))


def lay_out_dcp_state(adam: TorchAdam, shard_nbytes: int) -> tuple[DcpLayout, dict[str, Locations]]:
    """Lay out parameters and training state in a torch distributed checkpoint.

    Args:
        adam: The state.
        shard_nbytes: Largest payload of a file.

    Returns:
        The layout of the files, and the location of each tensor by its name in the source.

    Raises:
        PrepError: DCP does not support a dtype, or there are too many tensors for one `.metadata`.
    """
    # Keys in the nested state dict -> entry with the name in the source.
    placed: dict[tuple[str, ...], LayoutEntry] = {}
    constants: list[DcpConstant] = []
    for file_name, dtype, shape, nbytes in adam.parameters:
        placed[MODEL, file_name] = (adam.names[file_name], dtype, shape, nbytes)
    for file_name, pair in adam.moments.items():
        for key, entry in zip(ENTRIES, pair, strict=True):
            placed[OPTIMIZER, "state", file_name, key] = entry
        step = StoredTensor("0", "float32", (), adam.step_content)
        constants.append(DcpConstant((OPTIMIZER, "state", file_name, STEP_ENTRY), step))
    groups = adam.groups
    pair = _parameter_groups(adam, list(groups.decayed), list(groups.not_decayed))
    for number, group in enumerate(pair):
        for key, value in group.items():
            constants.append(DcpConstant((OPTIMIZER, "param_groups", number, key), value))
    paths = {".".join(path): path for path in placed}
    entries = [(".".join(path), *entry[1:]) for path, entry in placed.items()]
    layout = lay_out_dcp_folder(entries, shard_nbytes, paths=paths, constants=constants)
    locations: dict[str, Locations] = {}
    for path, (name, *_) in placed.items():
        locations[name] = (layout.locations[".".join(path)],)
    return layout, locations


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
