"""The model of an evaluation on its devices."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepcli.commands.operations.compute_options import EvaluateOptions
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.observer import Observer
from trainer.recipe import Recipe
from trainer.run.params import OpenedModel

if TYPE_CHECKING:
    from prepcli.models.param_tree import Tree
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import EvalStep


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its devices, and the options of its evaluation."""

    params: Tree
    forward_config: ForwardConfig
    eval_step: EvalStep
    batch_size: int


def load_model(
    options: EvaluateOptions, opened: OpenedModel, recipe: Recipe, observer: Observer
) -> LoadedModel:
    """Load the parameters in the dtype of the computation, and choose how to compute.

    Args:
        options: Batch size and reduction.
        opened: The model and its mesh.
        recipe: Recipe of one of the sources. They differ only in their data.
        observer: Receives notes and warnings.
    """
    from trainer.distributed.compiled_function import CompiledFunction
    from trainer.distributed.mesh_devices import device_kind
    from trainer.generation.decode import inference_dtype
    from trainer.nn.kernels.options import AttentionOptions
    from trainer.nn.model_spec import ForwardConfig
    from trainer.planning.step_inputs import check_token_split, chunk_sizes
    from trainer.training.attention_choice import choose_kernel
    from trainer.training.evaluation import jit_eval_step, jit_row_eval_step

    sharding = opened.sharding
    check_token_split(recipe, sharding.sequence_parallel_size)
    if options["reduction"] == "exact":
        _check_exact(opened)
    # Each replica computes the same number of rows.
    num_replicas = sharding.data_parallel_size
    batch_size = -(-options["batch_size"] // num_replicas) * num_replicas
    kernel = choose_kernel(recipe, opened.model, sharding, warn=observer.warn)
    sizes = chunk_sizes(recipe, device_kind(sharding), num_rows=batch_size // num_replicas)
    forward_config = ForwardConfig(
        recipe.model.dtype,
        scan_layers=opened.model.has_stacked_layers,
        head_chunk_size=sizes.head,
        sharding=sharding,
        attention_options=AttentionOptions(kernel.name, sizes.queries, sizes.keys),
    )
    observer.note("loading the parameters")
    params = opened.load(lambda path: inference_dtype(path, recipe.model.dtype))
    jit_step = jit_row_eval_step if options["reduction"] == "exact" else jit_eval_step
    eval_step = CompiledFunction(jit_step(opened.model, forward_config))
    return LoadedModel(params, forward_config, eval_step, batch_size)


def _check_exact(opened: OpenedModel) -> None:
    """Raise UsageError if sequences cannot be computed one by one."""
    exact = Option("reduction", "exact")
    if opened.model.arch_config.encoder is not None:
        raise usage_error(
            text("{} is not supported for models with an encoder", exact),
            "equal results for every mesh and batch size are ensured only without an encoder",
            text("{}", Option("reduction", "fast")),
        )
    if opened.sharding.sequence_parallel_size > 1:
        raise usage_error(
            text("{} is not supported with {}", exact, Option("mesh", opened.sharding.mesh)),
            "each sequence is computed on one device",
            "use a mesh without sp",
        )
