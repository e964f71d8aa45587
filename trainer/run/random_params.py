"""Random parameters of a config.json on a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepcli.core.json_values import HFConfig
from prepcli.models.parameters import parameter_rows
from prepcli.models.partition import vocab_multiple
from prepcli.models.registry import family_of
from prepcli.sources.tensor_match import Vocabulary, read_vocabulary, with_vocabulary
from trainer.run.params import make_sharding

if TYPE_CHECKING:
    from prepcli.models.param_tree import Tree
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec


def model_of_config(config: HFConfig, mesh: str | None) -> tuple[ModelSpec, ShardingContext]:
    """Return the model of a config, with stacked layers and a vocabulary padded to the size that a mesh divides.

    Args:
        config: Content of a config.json.
        mesh: `dp,fsdp,mp` sizes or named axes, or None for the first device.

    Raises:
        PrepError: The config or the mesh is invalid, or the mesh does not divide a parameter.
    """
    from trainer.nn.model_spec import build_model
    from trainer.training.manifest_model import check_mesh_divides

    family = family_of(config)
    sharding = make_sharding(mesh, ())
    vocabulary = read_vocabulary(config, family.sizes(config)["vocab"])
    dims = {path: row.leaf_dims for path, row in parameter_rows(family, config).items()}
    multiple = vocab_multiple(dims, sharding.mesh, sharding.rules)
    padded = Vocabulary(vocabulary.true_size, -(-vocabulary.stored_size // multiple) * multiple)
    model = build_model(family, with_vocabulary(config, padded), family.is_tied(config))
    check_mesh_divides(model, sharding)
    return model, sharding


def init_random_params(
    model: ModelSpec, sharding: ShardingContext, *, seed: int, dtype: str
) -> Tree:
    """Return random parameters in shards of a mesh. Each device computes its shards.

    Args:
        model: The model.
        sharding: The mesh and its rules.
        seed: Seed of the random key.
        dtype: Dtype of the arrays.
    """
    import jax

    from prepcli.models.param_tree import unflatten_tree
    from trainer.nn.initialization import init_params

    def make_params() -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(model, seed))

    # One compiled program makes all leaves in their shards: no device or host holds a whole leaf.
    shardings = {path: sharding.param_sharding(leaf) for path, leaf in model.leaves.items()}
    return jax.jit(make_params, out_shardings=unflatten_tree(shardings))()
