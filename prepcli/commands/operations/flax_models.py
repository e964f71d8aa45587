"""Models as modules of Flax, and their parameters as the trees of Flax classes. These functions import jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from prepcli.commands.operations.open_params import open_parameters
from prepcli.commands.operations.opening import common_options, open_checkpoint
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.options import ModuleOptions, SourceOptions
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import Observer, Progress, SilentObserver, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.models.param_tree import Tree
from prepcli.models.parameters import Family
from prepcli.models.registry import family_of
from trainer.run.random_params import init_random_params, model_of_config

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.flax_modules.computation import Computation
    from trainer.flax_modules.linen_module import LinenModel
    from trainer.flax_modules.nnx_module import NNXModel
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
        from trainer.flax_modules.nnx_module import NNXModel

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
        from trainer.flax_modules.linen_module import LinenModel

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
    """Load or draw the parameters of a module, and build the `Computation` that it runs."""
    from trainer.flax_modules.computation import Computation

    param_dtype = options.get("param_dtype", "float32")
    if isinstance(model, Mapping):
        spec, sharding = model_of_config(model, mesh)
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
    with open_parameters(model, mesh, options, verify=verify, observer=observer) as opened:
        computation = Computation(
            opened.model, _forward_config(opened.model, opened.sharding, options)
        )
        return opened.load(lambda path: param_dtype), computation


def _forward_config(model: ModelSpec, sharding: ShardingContext, options: Any) -> ForwardConfig:
    """Return the execution options of a module.

    Raise UsageError if the kernel cannot compute the model's attention.
    """
    from prepcli.models.attention_kernels import KERNEL_SPECS, unmet_needs
    from prepcli.models.attention_needs import AttentionNeeds, required_attention_features
    from prepcli.models.param_tree import widest_head
    from trainer.distributed.mesh_devices import device_kind
    from trainer.nn.kernels.options import AttentionOptions
    from trainer.nn.model_spec import ForwardConfig

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
