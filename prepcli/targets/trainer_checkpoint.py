"""The training state in a checkpoint of transformers' Trainer: optimizer.pt, scheduler.pt, trainer_state.json.

Format: `_save_optimizer_and_scheduler` in trainer.py and `TrainerState` in trainer_callback.py of transformers 5, and
the state dicts of `torch.optim.AdamW` and `torch.optim.lr_scheduler.LambdaLR` of PyTorch 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.torch_pickle import SUPPORTED_DTYPES, PickledValue, StoredTensor
from prepcli.formats.torch_zip import encode_object
from prepcli.models.module_order import OptimizerGroups
from prepcli.planning.plan import Contiguous, OutputFile, SmallFile
from prepcli.sources.adam_state import AdamSettings, AdamState, moment_names
from prepcli.sources.side_files import TRAINER_STATE_FILE
from prepcli.sources.source import SCHEDULER_FILE
from prepcli.targets.hf_folder import json_bytes

OPTIMIZER_FILE = "optimizer.pt"
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
class MomentLayout:
    """Dtype and output shape of a parameter's moments."""

    first_dtype: str
    second_dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """Layout of optimizer.pt.

    Attributes:
        file: The file.
        locations: Location of each moment, by its name.
    """

    file: OutputFile
    locations: Mapping[str, Contiguous]


def lay_out_optimizer_file(
    state: AdamState,
    settings: AdamSettings,
    groups: OptimizerGroups,
    *,
    moments: Mapping[str, MomentLayout],
    file_number: int,
) -> OptimizerFile:
    """Lay out the state dict of AdamW.

    Args:
        state: The training state.
        settings: Settings of the optimizer.
        groups: Names of the parameters, in the order of their numbers.
        moments: Layout of the moments, by the name of the parameter.
        file_number: Number of the file in the output.

    Raises:
        PrepError: PyTorch has no such dtype.
    """
    num_updates = np.float32(state.num_updates).tobytes()
    entries: dict[int, PickledValue] = {}
    keys: dict[str, str] = {}
    for number, name in enumerate(groups.numbered):
        layout = moments[name]
        first_name, second_name = moment_names(name)
        keys |= {first_name: f"{number}.1", second_name: f"{number}.2"}
        entries[number] = {
            "step": StoredTensor(f"{number}.0", "float32", (), num_updates),
            "exp_avg": _stored_moment(f"{number}.1", layout.first_dtype, layout.shape),
            "exp_avg_sq": _stored_moment(f"{number}.2", layout.second_dtype, layout.shape),
        }
    archive = encode_object({"state": entries, "param_groups": parameter_groups(settings, groups)})
    file = OutputFile(OPTIMIZER_FILE, archive.nbytes, constant_ranges=archive.constant_ranges)
    locations: dict[str, Contiguous] = {}
    for name, key in keys.items():
        locations[name] = Contiguous(file_number, archive.offsets[key])
    return OptimizerFile(file, locations)


def _stored_moment(key: str, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    if dtype not in SUPPORTED_DTYPES:
        hint = text("export it without {}", Option("training_state", True))
        raise PrepError(f"moments are {dtype}", "a PyTorch file of prep has no such dtype", hint)
    return StoredTensor(key, dtype, shape)


def parameter_groups(settings: AdamSettings, groups: OptimizerGroups) -> list[PickledValue]:
    """Return the parameter groups of `torch.optim.AdamW.state_dict`, with the parameters as numbers."""
    num_decayed = len(groups.decayed)
    num_parameters = len(groups.numbered)
    return [
        parameter_group(settings, settings.weight_decay, list(range(num_decayed))),
        parameter_group(settings, 0.0, list(range(num_decayed, num_parameters))),
    ]


def parameter_group(
    settings: AdamSettings, weight_decay: float, parameters: PickledValue
) -> dict[str, PickledValue]:
    """Return a group with the keys of `torch.optim.AdamW`, in their order.

    None of the implementations (foreach, fused) is chosen, so PyTorch chooses one for the devices.
    """
    return {
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


def scheduler_file(state: AdamState, settings: AdamSettings) -> SmallFile:
    """Return the state of `LambdaLR`. Trainer makes the function of the schedule from its own arguments."""
    archive = encode_object(
        {
            "base_lrs": [settings.peak_lr] * NUM_GROUPS,
            "last_epoch": state.step,
            "_step_count": state.step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [settings.lr] * NUM_GROUPS,
            "lr_lambdas": [{} for _ in range(NUM_GROUPS)],
        }
    )
    ((_, content),) = archive.constant_ranges
    return SmallFile(SCHEDULER_FILE, content)


def trainer_state_file(state: AdamState) -> SmallFile:
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
