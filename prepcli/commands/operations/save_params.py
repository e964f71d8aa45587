"""Write parameters in memory as an Orbax checkpoint, with the settings of another checkpoint of the model.

The function imports jax.
"""

# pyright: reportTypedDictNotRequiredAccess=false
# A reader has the manifest of a complete model, so its optional keys exist.

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from prepcli.commands.operations.opening import common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import SourceOptions
from prepcli.core.errors import Option, OutputExistsError, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import SilentObserver
from prepcli.core.option_spec import PathLike
from prepcli.engine.budget import make_budget
from prepcli.engine.checkpoint_store import LeafSpec
from prepcli.execution.step_writer import MEMORY_NBYTES, StepWriter
from prepcli.models.param_tree import param_leaves
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.state_names import PARAMS
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import HF_FOLDER, Source
from prepcli.targets.hf_folder import copied_small_files, settings_files
from prepcli.targets.training_step import plan_training_step
from trainer.run.start import start_manifest, stored_towers

COMMAND = "save-params"


@public
def save_params(
    params: Mapping[str, Any], out: PathLike, *, like: PathLike, **options: Unpack[SourceOptions]
) -> Path:
    """Write parameters as an Orbax checkpoint, which `export`, `train` and all other functions read.

    The values are written as they are. One process must hold the arrays.

    Args:
        params: The tree of `load_params`, with layers stacked on the first axis: of arrays of JAX or NumPy.
        out: Output folder.
        like: A checkpoint of the same model. Its config and its tokenizer are copied. Its weights are not.
        **options: See `SourceOptions`. They apply to `like`.

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
            "parameters cannot be saved",
            "an array is on devices of several processes",
            "gather the arrays in one process, or train with a recipe, which saves shards",
        )
    folder = Path(out)
    # `lexists` is true for a broken link too, which `exists` would miss.
    if os.path.lexists(folder):
        raise OutputExistsError(
            f"{folder} already exists",
            "parameters do not replace it",
            text("choose another {}", Option("out")),
        )
    located, source = open_checkpoint(common_options(like, folder, options), SilentObserver())
    leaves = host_leaves({"params": arrays})
    shapes = {name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
    plan = _plan_item(shapes, source, located, like=str(like))
    StepWriter(plan, folder, leaves).write()
    return folder


def _plan_item(
    shapes: Mapping[str, LeafSpec], source: Source, located: LocatedCheckpoint, *, like: str
) -> Plan:
    """Plan an Orbax checkpoint of parameters: a training step without optimizer state.

    Args:
        shapes: Shapes and dtypes of the leaves.
        source: The checkpoint of the same model.
        located: The same checkpoint. It has the name of the model.
        like: Its path, as the user named it.
    """
    tokens = shapes.get(f"{PARAMS}.embed.tokens")
    if tokens is None:
        raise _mismatch_error(source, "the tree has no embed.tokens")
    # The tree decides about the padding, e.g. [50264, 2048] for 50257 tokens. A 0-d array counts as one row here, and
    # `_check_leaves` reports its shape.
    manifest = _manifest_fields(source, located.model_name, vocab_rows=(*tokens.shape, 1)[0])
    _check_leaves(shapes, source, manifest)
    if source.wrapper is not None:
        # The output has only the parameters.
        stored = stored_towers(source, like, located.files.commit)
        manifest |= Manifest(towers={**(manifest.towers or {}), **stored})
    request = f"prep.save_params(like={source.display_name!r})"
    plan = plan_training_step(
        shapes, manifest, request=request, slab_nbytes=make_budget(MEMORY_NBYTES).slab_nbytes
    )
    return replace(
        plan,
        command=COMMAND,
        item="",
        settings=plan.settings | Manifest(kind="init"),
        small_files=_small_files(source, plan.settings.config),
    )


def _manifest_fields(source: Source, name: str, *, vocab_rows: int) -> Manifest:
    """Return the manifest of the model with `vocab_rows` rows of the vocabulary, for chunks of bounded size."""
    with WeightsReader(source, vocab_rows, verify=False) as reader:
        rules = [*source.tree_manifest.rules]
        return start_manifest(source, reader, name) | Manifest(mesh=None, rules=rules)


def _check_leaves(shapes: Mapping[str, LeafSpec], source: Source, manifest: Manifest) -> None:
    """Raise PrepError unless the leaves have the paths and shapes of the model's parameters."""
    expected = {
        f"{PARAMS}.{path}": leaf.shape
        for path, leaf in param_leaves(source.family, manifest.config, manifest.tied).items()
    }
    for name in sorted(expected.keys() | shapes.keys()):
        path = name.removeprefix(f"{PARAMS}.")
        if name not in shapes:
            raise _mismatch_error(source, f"the tree has no {path}")
        if name not in expected:
            raise _mismatch_error(source, f"the model has no {path}")
        if shapes[name].shape != expected[name]:
            raise _mismatch_error(
                source, f"{path} has shape {shapes[name].shape}, not {expected[name]}"
            )


def _mismatch_error(source: Source, why: str) -> PrepError:
    return PrepError(
        f"the parameters do not match {source.display_name}",
        why,
        text("{} with a checkpoint of the same model", Option("like")),
    )


def _small_files(source: Source, config: HFConfig) -> tuple[SmallFile, ...]:
    prefix = f"{HF_FOLDER}/"
    extra_files = copied_small_files(source, prefix)
    return settings_files(config, extra_files=extra_files, path_prefix=prefix)
