"""The moving average of a run's parameters (`optimizer.ema`) in place of the parameters."""

from __future__ import annotations

from dataclasses import replace

from prepcli.core.errors import Key, Option, PrepError, text, usage_error
from prepcli.planning.state_rows import is_leaf_path
from prepcli.planning.tensors import OPT_STATE, PARAMS, SEPARATOR, qualify, split_name
from prepcli.sources.source import Source, SourceTensor

AVERAGE_SLOT = f"{OPT_STATE}.ema"


def use_averaged_params(source: Source) -> Source:
    """Return the source of a training step with the averages as its parameters.

    The parameters become a part of the other training state.

    Raises:
        UsageError: The checkpoint has no averages.
        PrepError: Some of the parameters have no average.
    """
    hint = text("remove {}", Option("ema", True))
    averages: list[SourceTensor] = []
    others: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot != AVERAGE_SLOT:
            others.append(tensor)
            continue
        # The averages of a complete slot are named like the tensors of the parameters. A slot that
        # lacks parameters keeps the paths of its leaves (`planning.state_rows`).
        if is_leaf_path(name):
            why = text("a run with {} averages only the other parameters", Key("optimizer.freeze"))
            raise PrepError(
                f"{source.display_name} has averages of some parameters only", why, hint
            )
        averages.append(replace(tensor, name=qualify(PARAMS, name)))
    if not averages:
        why = text("{} was not set in the run's recipe", Key("optimizer.ema"))
        raise usage_error(f"{source.display_name} has no averaged parameters", why, hint)
    parameters = [
        replace(tensor, name=f"{PARAMS}{SEPARATOR}{tensor.name}") for tensor in source.tensors
    ]
    return replace(
        source, tensors=tuple(averages), state_tensors=(*parameters, *others), has_averages=True
    )
