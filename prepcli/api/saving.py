"""Save parameters in memory. These functions import jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from prepcli.api.session import silent_ui
from prepcli.commands import save_params as save_params_command
from prepcli.errors import usage_error
from prepcli.operations.conversion import common_options
from prepcli.operations.operation import public
from prepcli.operations.option_spec import PathLike
from prepcli.operations.options import SourceOptions


@public
def save_params(
    params: Mapping[str, Any], out: PathLike, *, like: PathLike, **options: Unpack[SourceOptions]
) -> Path:
    """Write parameters as an Orbax checkpoint, which `export`, `train` and all other functions read.

    The values are written as they are. One process must hold the arrays.

    Args:
        params: The tree of `load_params`, with layers stacked on the first axis: of arrays of JAX or NumPy.
        out: Output folder.
        like: A checkpoint of the same model. Its config and its tokenizer are copied; its weights are not.
        **options: See `SourceOptions`; they apply to `like`.

    Returns:
        The output folder.

    Raises:
        UsageError: An argument is invalid, or an array is on devices of other processes.
        OutputExistsError: `out` exists.
        PrepError: The parameters do not fit the model of `like`, or the output cannot be written.
    """
    import jax
    import jax.numpy as jnp

    from trainer.training.checkpoint import host_leaves

    arrays = jax.tree.map(jnp.asarray, {**params})
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(arrays)):
        raise usage_error(
            "parameters cannot be saved", "an array is on devices of several processes"
        )
    request = save_params_command.SaveParamsRequest(
        common_options(like, out, options), host_leaves({"params": arrays})
    )
    return save_params_command.save_params(request, silent_ui("save-params"))
