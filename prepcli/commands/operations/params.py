"""Parameters of a checkpoint in memory: load them, save them, use them with Flax. The functions import jax."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from prepcli.commands.operations.checkpoint_options import common_options, open_checkpoint
from prepcli.commands.operations.computing import open_params
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import ModuleOptions, SourceOptions
from prepcli.core.errors import Option, OutputExistsError, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import Observer, Progress, SilentObserver, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.core.process_group import SingleProcess
from prepcli.engine.budget import make_budget
from prepcli.execution.training_folder import FolderStep
from prepcli.execution.training_storage import MEMORY_NBYTES, StepSave, write_step
from prepcli.models.param_tree import Tree, param_leaves
from prepcli.models.parameters import Family
from prepcli.models.registry import family_of
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan
from prepcli.planning.tensors import PARAMS, LeafSpec
from prepcli.restore.digest_checks import check_without_checksums
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import HF_FOLDER, Source
from prepcli.targets.hf_folder import copied_small_files, settings_files
from prepcli.targets.orbax_item import plan_training_step
from trainer.run.params import build_model_on_mesh, init_random_params, load_verbatim_params
from trainer.run.start import start_manifest, stored_towers

LoadDtype = Literal["float32", "bfloat16", "keep"]


@public
def load_params(
    checkpoint: PathLike,
    mesh: str | None = None,
    *,
    dtype: LoadDtype = "float32",
    verify: bool = True,
    ema: bool = False,
    verbatim: bool | None = None,
    progress: Progress | Observer | None = None,
    **options: Unpack[SourceOptions],
) -> Tree:
    """Read the parameters of a checkpoint onto a device mesh.

    Each device gets only the byte ranges of its own shards. The source may have any format that prep reads.
    Sources that are not in prep's default layout are converted while they are read: layers stacked on the first axis,
    the vocabulary padded to the size that the mesh divides. No file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        mesh: `dp,fsdp,mp` sizes, or named axes such as `fsdp:64,mp:4`. None: the first device.
        dtype: Dtype of the arrays, "float32" or "bfloat16". "keep": the stored dtype of each parameter.
        verify: Compare every byte with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        verbatim: Read the tensors under the names of the file. Default: if no family has the model_type. False raises
            then.
        progress: Receives the bytes downloaded or checked. Default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        Nested dict of arrays, sharded by the family's partition rules. Weights are `[out, in]`. The query weight of the
        stacked layers is `[layers, heads, head_dim, embed]`. Of a checkpoint without a family, a dict of arrays by path
        in the file, with `*` for stacked numbers. Its 64-bit tensors are NumPy arrays.

    Raises:
        UsageError: An argument is invalid, or the mesh does not fit the devices or does not divide a parameter.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint cannot be read, or lacks a parameter.
    """
    observer = observer_of(progress)
    common = common_options(checkpoint, None, {**options, "ema": ema, "verbatim": verbatim})
    located, source = open_checkpoint(common, observer)
    if source.family.is_verbatim:
        observer.warn(f"{source.display_name}: {CANNOT_TRAIN}")
        return load_verbatim_params(
            source,
            located.files.path,
            mesh,
            dtype=None if dtype == "keep" else dtype,
            verify=verify,
            on_unchecked=lambda: check_without_checksums(source, source.tensors, observer),
        )
    with open_params(located, source, mesh, verify=verify, observer=observer) as opened:
        if dtype == "keep":
            return opened.load(opened.stored_dtype)
        return opened.load(lambda path: dtype)


# --- Save parameters


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
    write_step(FolderStep(StepSave(0, plan, leaves, SingleProcess()), folder))
    return folder


def _plan_item(
    shapes: Mapping[str, LeafSpec], source: Source, located: LocatedCheckpoint, *, like: str
) -> Plan:
    """Plan an Orbax checkpoint of parameters: a training step without optimizer state."""
    tokens = shapes.get(f"{PARAMS}.embed.tokens")
    if tokens is None:
        raise _mismatch_error(source, "the tree has no embed.tokens")
    # The tree decides about the padding, e.g. [50264, 2048] for 50257 tokens. A 0-d array counts as one row here, and
    # `_check_leaves` reports its shape.
    with WeightsReader(source, (*tokens.shape, 1)[0], verify=False) as reader:
        # The chunks have bounded sizes.
        bounded = Manifest(mesh=None, rules=[*source.tree_manifest.rules])
        manifest = start_manifest(source, reader, located.model_name) | bounded
    _check_leaves(shapes, source, manifest)
    if source.wrapper is not None:
        # The output has only the parameters.
        stored = stored_towers(source, like, located.files.commit)
        manifest |= Manifest(towers={**(manifest.towers or {}), **stored})
    request = f"prep.save_params(like={source.display_name!r})"
    plan = plan_training_step(
        shapes, manifest, request=request, slab_nbytes=make_budget(MEMORY_NBYTES).slab_nbytes
    )
    prefix = f"{HF_FOLDER}/"
    extra_files = copied_small_files(source, prefix)
    return replace(
        plan,
        command=COMMAND,
        item="",
        settings=plan.settings | Manifest(kind="init"),
        small_files=settings_files(
            plan.settings.config, extra_files=extra_files, path_prefix=prefix
        ),
    )


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


# --- Modules and trees of Flax


if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.flax_modules.modules import Computation, LinenModel, NNXModel
    from trainer.nn.model_spec import ForwardConfig, ModelSpec
else:
    LinenModel = NNXModel = Any  # annotations are evaluated without Flax


@public
def nnx_model(
    model: PathLike | Mapping[str, Any],
    mesh: str | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[ModuleOptions],
) -> NNXModel:
    """Return a model as a module of `flax.nnx`.

    `model(tokens)` computes logits, and `model.loss_sums(tokens, targets, weights)` the sums of the cross entropy
    without the logits of all tokens. `model.params` is the tree of `load_params`. `nnx.update(model, tree)` sets it.
    Dropout is not supported.

    Args:
        model: A checkpoint as for `load_params`, or the fields of a config.json for random parameters.
        mesh: `dp,fsdp,mp` sizes, or named axes such as `fsdp:64,mp:4`. None: the first device.
        progress: Receives the bytes downloaded or checked. Default: none. See `Progress`.
        **options: See `ModuleOptions`.

    Returns:
        The module, with parameters sharded by the family's partition rules.

    Raises:
        UsageError: An argument is invalid, or the mesh does not fit the devices or does not divide a parameter.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint or the config cannot be used, or Flax is not installed.
    """
    with _explain_missing_flax():
        from trainer.flax_modules.modules import NNXModel

    params, computation = _build_computation(model, mesh, options, progress)
    return NNXModel(params, computation)


@public
def linen_model(
    model: PathLike | Mapping[str, Any],
    mesh: str | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[ModuleOptions],
) -> tuple[LinenModel, dict[str, Tree]]:
    """Return a model as a module of `flax.linen`, and its variables.

    `model.apply(variables, tokens)` computes logits. `method="loss_sums"` computes the sums of the cross entropy
    without the logits of all tokens. `variables["params"]` is the tree of `load_params`. Dropout is not supported.

    Args:
        model: A checkpoint as for `load_params`, or the fields of a config.json for random parameters.
        mesh: `dp,fsdp,mp` sizes, or named axes such as `fsdp:64,mp:4`. None: the first device.
        progress: Receives the bytes downloaded or checked. Default: none. See `Progress`.
        **options: See `ModuleOptions`.

    Returns:
        The module, and the variables with parameters sharded by the family's partition rules.

    Raises:
        UsageError: An argument is invalid, or the mesh does not fit the devices or does not divide a parameter.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint or the config cannot be used, or Flax is not installed.
    """
    with _explain_missing_flax():
        from trainer.flax_modules.modules import LinenModel

    params, computation = _build_computation(model, mesh, options, progress)
    return LinenModel(computation), {"params": params}


@public
def to_hf_flax(
    params: Mapping[str, Any], model: PathLike | Mapping[str, Any], **options: Unpack[SourceOptions]
) -> Tree:
    """Return parameters as the tree of the family's Flax class in transformers 4, without padding of the vocabulary.

    `export` with `layout="hf-flax"` writes the same tree. The conversion takes twice the memory of the parameters.

    Args:
        params: The tree of `load_params`.
        model: A checkpoint of the same model, or the fields of its config.json.
        **options: See `SourceOptions`.

    Returns:
        Nested dict of arrays, `params` of the Flax class.

    Raises:
        UsageError: An argument is invalid.
        PrepError: The checkpoint cannot be read, the parameters do not fit it, or its family has no Flax class.
    """
    from trainer.flax_modules.hf_flax_tree import to_hf_flax_tree

    return to_hf_flax_tree({**params}, *_read_config(model, options))


@public
def from_hf_flax(
    tree: Mapping[str, Any], model: PathLike | Mapping[str, Any], **options: Unpack[SourceOptions]
) -> Tree:
    """Return the parameters of a Flax class of transformers 4 as the tree of `load_params`.

    The arrays are not sharded. The conversion takes twice the memory of the parameters.

    Args:
        tree: `params` of the Flax class, as nested dicts.
        model: A checkpoint of the same model, or the fields of its config.json. Rows of the vocabulary beyond its
            `true_vocab_size` are zeros.
        **options: See `SourceOptions`.

    Returns:
        Nested dict of arrays, with layers stacked on the first axis.

    Raises:
        UsageError: An argument is invalid.
        PrepError: The checkpoint cannot be read, the tree does not fit it, or its family has no Flax class.
    """
    from trainer.flax_modules.hf_flax_tree import from_hf_flax_tree

    return from_hf_flax_tree({**tree}, *_read_config(model, options))


@contextmanager
def _explain_missing_flax() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        # The modules import more than Flax. Another missing module is a defect and must not be reported as missing
        # Flax.
        if error.name != "flax":
            raise
        raise PrepError(
            "Flax modules are not available",
            "flax is not installed",
            "`pip install 'prepcli[flax]'`",
        ) from error


def _read_config(model: PathLike | HFConfig, options: Any) -> tuple[Family, HFConfig]:
    """Return the family and the config of a model. Only headers of a checkpoint are read."""
    if isinstance(model, Mapping):
        return family_of(model), model
    _, source = open_checkpoint(common_options(model, None, options), SilentObserver())
    return source.family, source.config


def _build_computation(
    model: PathLike | HFConfig,
    mesh: str | None,
    options: Any,
    progress: Progress | Observer | None,
) -> tuple[Tree, Computation]:
    """Load or draw the parameters of a module, and build its `Computation`."""
    from trainer.flax_modules.modules import Computation

    param_dtype = options.get("param_dtype", "float32")
    if isinstance(model, Mapping):
        spec, sharding = build_model_on_mesh(model, mesh)
        # The kernel is checked before the parameters are drawn, which takes long for a large model.
        computation = Computation(spec, _forward_config(spec, sharding, options))
        return init_random_params(
            spec, sharding, seed=options.get("seed", 0), dtype=param_dtype
        ), computation
    # A test of the key, because seed=0 has no effect on a checkpoint either.
    if "seed" in options:
        raise usage_error(
            text("{} has no effect", Option("seed", options["seed"])),
            "the parameters come from the checkpoint",
            text("remove {}", Option("seed")),
        )
    verify = options.get("verify", True)
    observer = observer_of(progress)
    located, source = open_checkpoint(common_options(model, None, options), observer)
    with open_params(located, source, mesh, verify=verify, observer=observer) as opened:
        computation = Computation(
            opened.model, _forward_config(opened.model, opened.sharding, options)
        )
        return opened.load(lambda path: param_dtype), computation


def _forward_config(model: ModelSpec, sharding: ShardingContext, options: Any) -> ForwardConfig:
    """Return the execution options of a module.

    Raise UsageError if the kernel cannot compute the model's attention.
    """
    from prepcli.models.attention_kernels import (
        KERNEL_SPECS,
        AttentionNeeds,
        required_attention_features,
        unmet_needs,
    )
    from prepcli.models.param_tree import widest_head
    from trainer.distributed.sharding import device_kind
    from trainer.nn.model_spec import AttentionOptions, ForwardConfig

    kernel = options.get("attention_kernel", "blockwise")
    dtype = options.get("dtype", "float32")
    features = required_attention_features(model.arch_config, model.leaves)
    needs = AttentionNeeds(features, dtype, widest_head(model.leaves))
    if reasons := list(unmet_needs(KERNEL_SPECS[kernel], needs, device_kind(sharding))):
        raise usage_error(
            text("{} cannot compute this model's attention", Option("attention_kernel", kernel)),
            f"it {'; it '.join(reasons)}",
            text("{}", Option("attention_kernel", "blockwise")),
        )
    return ForwardConfig(
        dtype=dtype,
        remat_policy=options.get("remat_policy", "none"),
        sharding=sharding,
        attention_options=AttentionOptions(kernel),
    )
