"""The training state in a torch distributed checkpoint, in the form of `get_state_dict` of PyTorch.

The keys are those of `{"model": ..., "optimizer": ...}` with the two results of
`torch.distributed.checkpoint.state_dict.get_state_dict`: `model.TENSOR`, `optimizer.state.TENSOR.exp_avg` and
`optimizer.param_groups.NUMBER.KEY`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from prepcli.formats.safetensors_layout import LayoutEntry
from prepcli.formats.torch_pickle import StoredTensor
from prepcli.models.module_order import OptimizerGroups
from prepcli.sources.adam_state import AdamSettings, AdamState
from prepcli.targets.dcp_folder import DcpConstant, DcpLayout, lay_out_dcp_folder
from prepcli.targets.trainer_checkpoint import parameter_group

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state"
PARAM_GROUPS = "param_groups"
ENTRIES = ("exp_avg", "exp_avg_sq")


def model_name(parameter: str) -> str:
    """Return the name of a parameter in the checkpoint."""
    return f"{MODEL}.{parameter}"


def moment_name(parameter: str, entry: str) -> str:
    """Return the name of a moment in the checkpoint."""
    return f"{OPTIMIZER}.{STATE}.{parameter}.{entry}"


def lay_out_dcp_state(
    parameters: Sequence[LayoutEntry],
    moments: Mapping[str, Sequence[LayoutEntry]],
    state: AdamState,
    settings: AdamSettings,
    *,
    groups: OptimizerGroups,
    shard_nbytes: int,
) -> DcpLayout:
    """Lay out parameters and training state.

    Args:
        parameters: The parameters, with their names in files.
        moments: Both moments of each parameter, by its name.
        state: The training state.
        settings: Settings of the optimizer.
        groups: Names of the parameters with and without weight decay.
        shard_nbytes: Largest payload of a file.

    Raises:
        PrepError: DCP does not support a dtype, or there are too many tensors for one `.metadata`.
    """
    entries: list[LayoutEntry] = []
    paths: dict[str, tuple[str, ...]] = {}
    for name, dtype, shape, nbytes in parameters:
        entries.append((model_name(name), dtype, shape, nbytes))
        paths[model_name(name)] = (MODEL, name)
    for name, pair in moments.items():
        for entry, (_, dtype, shape, nbytes) in zip(ENTRIES, pair, strict=True):
            full_name = moment_name(name, entry)
            entries.append((full_name, dtype, shape, nbytes))
            paths[full_name] = (OPTIMIZER, STATE, name, entry)
    constants = [*_step_constants(state, moments), *_group_constants(settings, groups)]
    return lay_out_dcp_folder(entries, shard_nbytes, paths=paths, constants=constants)


def _step_constants(state: AdamState, names: Mapping[str, object]) -> Iterator[DcpConstant]:
    """Yield the number of updates of each parameter."""
    step = StoredTensor("0", "float32", (), np.float32(state.num_updates).tobytes())
    for name in names:
        yield DcpConstant((OPTIMIZER, STATE, name, "step"), step)


def _group_constants(settings: AdamSettings, groups: OptimizerGroups) -> Iterator[DcpConstant]:
    """Yield the settings of both groups of parameters, with the parameters by name."""
    pair = (
        parameter_group(settings, settings.weight_decay, list(groups.decayed)),
        parameter_group(settings, 0.0, list(groups.not_decayed)),
    )
    for number, group in enumerate(pair):
        for key, value in group.items():
            yield DcpConstant((OPTIMIZER, PARAM_GROUPS, number, key), value)
