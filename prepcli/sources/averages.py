"""The moving average of a run's parameters (`optimizer.ema`) in place of the parameters."""

from __future__ import annotations

from dataclasses import replace

from prepcli.errors import PrepError, usage_error
from prepcli.planning.state_names import OPT_STATE, PARAMS, SEPARATOR, qualify, split_name
from prepcli.planning.state_rows import is_leaf_path
from prepcli.sources.source import Source

AVERAGE_SLOT = f"{OPT_STATE}.ema"


def use_averages(source: Source) -> Source:
    """Return the source of a training step with the averages as its parameters.

    The parameters become a part of the other training state.

    Raises:
        UsageError: The checkpoint has no averages.
        PrepError: Averages of some parameters only are not supported.
    """
    in_slot = [
        tensor for tensor in source.state_tensors if split_name(tensor.name)[0] == AVERAGE_SLOT
    ]
    if not in_slot:
        why = "`optimizer.ema` was not set in the run's recipe"
        raise usage_error(
            f"{source.display_name} has no averaged parameters", why, "remove `--ema`"
        )
    if any(is_leaf_path(split_name(tensor.name)[1]) for tensor in in_slot):
        why = "a run with `optimizer.freeze` averages only the other parameters"
        raise PrepError(
            f"{source.display_name} has averages of some parameters only", why, "remove `--ema`"
        )
    averages = tuple(
        replace(tensor, name=qualify(PARAMS, split_name(tensor.name)[1])) for tensor in in_slot
    )
    parameters = (
        replace(tensor, name=f"{PARAMS}{SEPARATOR}{tensor.name}") for tensor in source.tensors
    )
    others = (
        tensor for tensor in source.state_tensors if split_name(tensor.name)[0] != AVERAGE_SLOT
    )
    return replace(
        source, tensors=averages, state_tensors=(*parameters, *others), has_averages=True
    )
