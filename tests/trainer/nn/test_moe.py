"""Experts: routing, the dense computation, and experts on a mesh."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax, nn
from jax.sharding import NamedSharding, PartitionSpec

from prepcli.commands.testing.tiny_model import relative_error
from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import expert_block_length
from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import ClampedSwiglu, Router
from prepcli.models.mesh import MeshAxes, parse_mesh
from prepcli.models.param_tree import unflatten_tree
from prepcli.models.rules import merge_rules
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.experts import EXPERT_DIMS, ExpertSharding, Routing, expert_sharding
from trainer.nn.mlp import mlp_hidden
from trainer.nn.moe import moe_mlp, route
from trainer.nn.projections import MoeWeights, RouterWeights, linear
from trainer.nn.token_chunks import over_token_chunks

# Tests of the mixture-of-experts MLP against a loop over experts in float64 and against a dense dispatch.

EXPERTS, D, F, SHARED = 5, 6, 7, 9

CLAMPED = ClampedSwiglu(alpha=1.702, limit=1.5)

# With 74 tokens, experts have several blocks, and the last block is incomplete.
ROWS, LENGTH = 2, 37

BLOCK = expert_block_length(ROWS * LENGTH, 2, EXPERTS)

Dispatch = Callable[[Array, Any, ArchConfig, ShardingContext], Array]


def make_moe_arch(top_k: int, normalize: bool = True) -> ArchConfig:
    """Return an architecture with `top_k` experts per token."""
    return dataclasses.replace(
        make_arch(), experts_per_token=top_k, router=Router(is_normalized=normalize)
    )


def random_inputs(
    routing: str = "random", dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Array, dict[str, Any]]:
    """Generate tokens, and a router and experts that route them in this way; the last element of a token is 1."""
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (EXPERTS, D),
        "gate": (EXPERTS, F, D),
        "up": (EXPERTS, F, D),
        "down": (EXPERTS, D, F),
    }
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x = rng.standard_normal((ROWS, LENGTH, D))
    x[..., -1] = 1
    if routing == "unused expert":
        weights["router"][3, -1] = -100
    elif routing == "one expert":
        weights["router"][2, -1] = 100
    elif routing == "ties":
        weights["router"][:] = 0
    elif routing == "padding":
        x[:, 20:] = 0
    return jnp.asarray(x, dtype), {
        name: {"weight": jnp.asarray(array, dtype)} for name, array in weights.items()
    }


def with_optional_parts(inputs: tuple[Array, dict[str, Any]]) -> tuple[Array, dict[str, Any]]:
    """Add biases, and shared experts with a gate."""
    (x, weights), rng = inputs, np.random.default_rng(7)

    def normal(*shape: int) -> dict[str, Array]:
        return {"weight": jnp.asarray(rng.standard_normal(shape), x.dtype)}

    biases = {"router": (EXPERTS,), "gate": (EXPERTS, F), "up": (EXPERTS, F), "down": (EXPERTS, D)}
    added: dict[str, Any] = {
        name: {**weights[name], "bias": normal(*shape)["weight"]} for name, shape in biases.items()
    }
    shared = {"gate": normal(SHARED, D), "up": normal(SHARED, D), "down": normal(D, SHARED)}
    return x, {**weights, **added, "shared": shared, "shared_gate": normal(D)}


def dense_moe_mlp(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Compute the weighted sum of each token's experts. Every expert computes every token, one expert at a time."""
    routing = route(x, weights["router"], arch_config, ExpertSharding())
    num_experts = len(weights["router"]["weight"])
    selected = nn.one_hot(routing.experts, num_experts, axis=0)  # [experts, B, T, K]
    experts = {name: projection for name, projection in weights.items() if name != "router"}

    @jax.checkpoint
    def weighted_expert(expert: Mapping[str, Any], token_weights: Array) -> Array:
        output = linear(mlp_hidden(x, expert, arch_config), expert["down"])
        return (output * token_weights[..., None]).astype(x.dtype)

    def add_expert(total: Array, expert: tuple[Mapping[str, Any], Array]) -> tuple[Array, None]:
        return total + weighted_expert(*expert), None

    token_weights = (routing.weights * selected).sum(-1)
    output, _ = lax.scan(add_expert, jnp.zeros_like(x), (experts, token_weights))
    return output


ROUTINGS = ("random", "unused expert", "one expert", "ties", "padding")


def float64_moe_mlp(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, _: ShardingContext
) -> Array:
    """Compute each expert for all tokens in the dtype of the arguments."""
    router = weights["router"]
    scores = jax.nn.softmax(x @ router["weight"].T + router.get("bias", 0.0))
    top = jnp.argsort(-scores, stable=True)[..., : arch_config.experts_per_token]
    selected = jax.nn.one_hot(top, EXPERTS, dtype=x.dtype).sum(-2) * scores
    if arch_config.router.is_normalized:
        selected = selected / selected.sum(-1, keepdims=True)
    projected = {
        name: jnp.einsum("btd,nfd->btnf", x, weights[name]["weight"]) + weights[name].get("bias", 0)
        for name in ("gate", "up")
    }
    hidden = glu(projected["gate"], projected["up"], arch_config.clamped_swiglu)
    outputs = jnp.einsum("btnf,ndf->btnd", hidden, weights["down"]["weight"])
    outputs = outputs + weights["down"].get("bias", 0.0)
    output = jnp.einsum("btnd,btn->btd", outputs, selected)
    if "shared" in weights:
        gate, up, down = (weights["shared"][name]["weight"] for name in ("gate", "up", "down"))
        shared = glu(x @ gate.T, x @ up.T, arch_config.clamped_swiglu) @ down.T
        output += jax.nn.sigmoid(x @ weights["shared_gate"]["weight"])[..., None] * shared
    return output


def glu(gate: Array, up: Array, clamped: ClampedSwiglu | None) -> Array:
    """Compute the hidden units from both projections."""
    if clamped is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, clamped.limit)
    up = jnp.minimum(jnp.maximum(up, -clamped.limit), clamped.limit)
    return (up + 1) * gate / (1 + jnp.exp(-clamped.alpha * gate))


@cache
def compiled(dispatch: Dispatch, arch_config: ArchConfig, chunk_size: int = -1) -> Any:
    """Return the compiled function of gradients and output."""

    def run(x: Array, weights: Mapping[str, Any], constants: None) -> Array:
        return dispatch(x, weights, arch_config, ShardingContext())

    def loss(x: Array, weights: Mapping[str, Any]) -> tuple[Array, Array]:
        output = over_token_chunks(run, x.shape[1], chunk_size)(x, weights, None)
        return jnp.square(output.astype(jnp.promote_types(output.dtype, jnp.float32))).sum(), output

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


def errors(
    dispatch: Dispatch, arch_config: ArchConfig, inputs: tuple[Array, Any], chunk_size: int = -1
) -> list[float]:
    """Return the relative errors of output and gradients against float64."""
    actual = jax.tree.leaves(compiled(dispatch, arch_config, chunk_size)(*inputs))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), inputs)
        expected = jax.tree.leaves(compiled(float64_moe_mlp, arch_config)(*wide))
        assert {leaf.dtype for leaf in expected} == {np.dtype(np.float64)}
    return [
        relative_error(np.asarray(a, np.float64), np.asarray(e)) for a, e in zip(actual, expected)
    ]


def check_is_as_exact_as_dense(
    inputs: tuple[Array, Any], arch_config: ArchConfig, chunk_size: int = -1
) -> None:
    """Compare the errors of output and gradients with those of the dense dispatch; both round about as often.

    The margin of 8 roundings is for arrays in which one of the two happens to be nearly exact.
    """
    eps = float(jnp.finfo(inputs[0].dtype).eps)
    sparse = errors(moe_mlp, arch_config, inputs, chunk_size)
    dense = errors(dense_moe_mlp, arch_config, inputs)
    assert all(error <= 2 * dense_error + 8 * eps for error, dense_error in zip(sparse, dense)), (
        sparse,
        dense,
    )
    assert max(sparse) < 64 * eps


DTYPES = (jnp.float32, jnp.bfloat16)

CASES = [
    (routing, top_k, dtype) for routing in ROUTINGS for top_k in (1, 2, EXPERTS) for dtype in DTYPES
]

FAST = [(routing, 2, jnp.float32) for routing in ROUTINGS if routing != "random"]


@pytest.mark.parametrize(("routing", "top_k", "dtype"), slow_except(CASES, FAST))
def test_moe_mlp_is_as_exact_as_dense_dispatch(routing: str, top_k: int, dtype: Any):
    """The normalized weight of a single expert is 1, and its gradient nothing but rounding."""
    check_is_as_exact_as_dense(
        random_inputs(routing, dtype), make_moe_arch(top_k, normalize=top_k > 1)
    )


@pytest.mark.parametrize(
    ("seed", "normalize"),
    slow_except([(seed, flag) for flag in (True, False) for seed in range(8)], [(0, False)]),
)
def test_moe_mlp_is_exact_for_random_routings(seed: int, normalize: bool):
    check_is_as_exact_as_dense(random_inputs(seed=seed), make_moe_arch(2, normalize))


@pytest.mark.parametrize("chunk_size", slow_except((1, 8, 36), (8,)))
def test_moe_mlp_in_token_chunks_is_as_exact(chunk_size: int):
    check_is_as_exact_as_dense(random_inputs(), make_moe_arch(2), chunk_size)


@pytest.mark.parametrize("clamped", slow_except([None, CLAMPED], [CLAMPED]))
def test_biases_and_shared_experts_are_exact(clamped: ClampedSwiglu | None):
    arch_config = dataclasses.replace(make_moe_arch(2), clamped_swiglu=clamped)
    inputs = with_optional_parts(random_inputs())
    assert max(errors(moe_mlp, arch_config, inputs)) < 64 * float(jnp.finfo(jnp.float32).eps)


def run_forward(x: Array, weights: Mapping[str, Any], top_k: int = 2) -> np.ndarray:
    """Compute the output."""
    compute = jax.jit(
        lambda x, weights: moe_mlp(x, weights, make_moe_arch(top_k), ShardingContext())
    )
    return np.asarray(compute(x, weights), np.float64)


def test_expert_without_tokens_is_not_computed():
    x, weights = random_inputs("unused expert")
    broken = {
        name: {"weight": leaf["weight"].at[3].set(jnp.nan)}
        for name, leaf in weights.items()
        if name != "router"
    }
    np.testing.assert_array_equal(run_forward(x, {**weights, **broken}), run_forward(x, weights))


def test_token_that_is_not_finite_changes_no_other_token():
    x, weights = random_inputs()
    output = run_forward(x.at[1, 5].set(jnp.inf), weights)
    assert np.isnan(output[1, 5]).all()
    output[1, 5] = run_forward(x, weights)[1, 5]
    np.testing.assert_allclose(output, run_forward(x, weights), rtol=1e-5, atol=1e-5)


def compiled_route(x: Array, weights: RouterWeights, arch_config: ArchConfig) -> Routing:
    """Return the experts of each token, computed by one program."""
    return jax.jit(lambda x, weights: route(x, weights, arch_config, ExpertSharding()))(x, weights)


def test_route_selects_top_k_in_float32():
    x, weights = random_inputs(dtype=jnp.bfloat16)
    routing = compiled_route(x, weights["router"], make_moe_arch(2))
    assert routing.weights.dtype == jnp.float32
    assert routing.experts.shape == (ROWS, LENGTH, 2)
    assert (routing.experts[..., 0] != routing.experts[..., 1]).all()
    np.testing.assert_allclose(routing.weights.sum(-1), 1, rtol=1e-6)


def test_moe_mlp_holds_hidden_units_of_one_block():
    """Neither the forward nor the backward pass has an array with the hidden units of all tokens or all experts."""
    x, weights = random_inputs()
    text = compiled(moe_mlp, make_moe_arch(2)).lower(x, weights).as_text()
    assert f"{BLOCK}x{F}xf32" in text
    for count in (ROWS * LENGTH, f"{ROWS}x{LENGTH}", ROWS * LENGTH * 2, f"{EXPERTS}x{BLOCK}"):
        assert f"{count}x{F}xf32" not in text


# Tests of the routers of MoE layers against NumPy in float64, token by token.

NUM_EXPERTS, TOP_K, WIDTH = 12, 3, 5

ROUTERS = {
    "softmax": Router(),
    "not normalized": Router(is_normalized=False, scale=2.5),
    "sigmoid": Router("sigmoid", weight_sum_offset=1e-20),
    "groups by maximum": Router(num_groups=4, groups_per_token=2, is_normalized=False),
    "groups by top two": Router(
        "sigmoid", num_groups=3, groups_per_token=1, group_score="top_two", scale=1.5
    ),
    "bounded sum": Router(min_weight_sum=0.9),
}


def expected_weights(
    token: np.ndarray, weights: dict[str, np.ndarray], router: Router
) -> np.ndarray:
    """Return the weight of each expert for a token, 0 for experts that are not selected."""
    logits = weights["weight"] @ token + weights["bias"]
    if router.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + weights["correction"]
    size = NUM_EXPERTS // router.num_groups
    count = 1 if router.group_score == "maximum" else 2
    groups = [np.sort(choice[i : i + size])[-count:].sum() for i in range(0, NUM_EXPERTS, size)]
    best = np.argsort(groups)[-router.groups_per_token :]
    allowed = [expert for expert in range(NUM_EXPERTS) if expert // size in best]
    selected = sorted(allowed, key=lambda expert: choice[expert])[-TOP_K:]
    result = np.zeros(NUM_EXPERTS)
    result[selected] = scores[selected]
    if router.is_normalized:
        result /= max(result.sum(), router.min_weight_sum)
    return result * router.scale


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_route_equals_numpy(router: Router):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 9, WIDTH))
    weights = {
        "weight": rng.standard_normal((NUM_EXPERTS, WIDTH)),
        "bias": rng.standard_normal(NUM_EXPERTS),
        "correction": rng.standard_normal(NUM_EXPERTS) / 4,
    }
    arch_config = dataclasses.replace(make_moe_arch(TOP_K), router=router)
    tree: RouterWeights = {
        "weight": jnp.asarray(weights["weight"], jnp.float32),
        "bias": jnp.asarray(weights["bias"], jnp.float32),
        "correction": {"bias": jnp.asarray(weights["correction"], jnp.float32)},
    }
    routing = compiled_route(jnp.asarray(x, jnp.float32), tree, arch_config)
    one_hot = np.eye(NUM_EXPERTS)[np.asarray(routing.experts)]
    actual = (np.asarray(routing.weights)[..., None] * one_hot).sum(-2)
    expected = [[expected_weights(token, weights, router) for token in row] for row in x]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_route_orders_logits_with_equal_float32_sigmoids(top_k: int):
    """Choose by the logits, as `Llama4Router` of transformers: sigmoid(18) == sigmoid(25) in float32."""
    router = Router("sigmoid", is_normalized=False)
    arch_config = dataclasses.replace(make_moe_arch(top_k), router=router)
    weights: RouterWeights = {"weight": jnp.array([[18.0], [25.0], [3.0], [1.0]])}
    routing = compiled_route(jnp.ones((1, 1, 1)), weights, arch_config)
    assert np.asarray(routing.experts).tolist() == [[[1, 0][:top_k]]]


def test_correction_has_no_gradient():
    arch_config = make_moe_arch(TOP_K)

    def total(correction: jax.Array) -> jax.Array:
        weights: RouterWeights = {
            "weight": jnp.eye(NUM_EXPERTS, WIDTH),
            "correction": {"bias": correction},
        }
        return route(jnp.ones((1, 2, WIDTH)), weights, arch_config, ExpertSharding()).weights.sum()

    assert not jax.jit(jax.grad(total))(jnp.arange(NUM_EXPERTS, dtype=jnp.float32)).any()


@pytest.mark.parametrize(
    ("router", "why"),
    [
        (Router(num_groups=5), "12 experts cannot be cut into 5 equal groups"),
        (Router(num_groups=2, groups_per_token=3), "a token has 3 groups of 2"),
        (Router(num_groups=12, groups_per_token=4, group_score="top_two"), "needs 2 or more"),
        (Router(num_groups=6), "a token has 3 experts, but its groups have 2"),
    ],
)
def test_check_experts_rejects_groups(router: Router, why: str):
    with pytest.raises(PrepError, match=why):
        router.check_experts(NUM_EXPERTS, TOP_K)


def test_router_with_own_norm_scales_input_and_weights():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 3, WIDTH))
    matrix = rng.standard_normal((NUM_EXPERTS, WIDTH))
    input_scale = rng.standard_normal(WIDTH)
    expert_scale = rng.standard_normal(NUM_EXPERTS)
    arch_config = dataclasses.replace(make_moe_arch(TOP_K), router=Router(has_own_norm=True))
    weights: RouterWeights = {
        "weight": jnp.asarray(matrix, jnp.float32),
        "input_scale": {"weight": jnp.asarray(input_scale, jnp.float32)},
        "expert_scale": {"weight": jnp.asarray(expert_scale, jnp.float32)},
    }
    routing = compiled_route(jnp.asarray(x, jnp.float32), weights, arch_config)
    root_mean_square = np.sqrt((x**2).mean(-1, keepdims=True) + arch_config.norm_eps)
    logits = (x / root_mean_square * input_scale / np.sqrt(WIDTH)) @ matrix.T
    best = np.argsort(logits)[..., ::-1][..., :TOP_K]
    np.testing.assert_array_equal(routing.experts, best)
    selected = np.exp(np.take_along_axis(logits, best, -1))
    expected = selected / selected.sum(-1, keepdims=True) * expert_scale[best]
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)


# Tests of the mesh axes of MoE layers and of the collectives that the compiler plans, on 8 CPU devices.

SHARDED_ROWS, SHARDED_LENGTH, SHARDED_D, SHARDED_F, SHARDED_EXPERTS = 8, 16, 32, 48, 4

SIZES = {"experts": SHARDED_EXPERTS, "mlp": SHARDED_F, "embed": SHARDED_D}

# The leaves of experts without adapters.
STACKED = {path: dims for path, dims in EXPERT_DIMS.items() if SIZES.keys() >= {*dims}}

DIMS = {**STACKED, "router.weight": ("experts", "embed")}

TOKENS = (SHARDED_ROWS, SHARDED_LENGTH, SHARDED_D)


def array_shapes(sharding: ShardingContext) -> tuple[Any, dict[str, Any]]:
    """Return tokens and weights without values, placed on the mesh."""
    assert sharding.device_mesh is not None
    weights = {}
    for name, dims in DIMS.items():
        shape = tuple(map(SIZES.__getitem__, dims))
        placed = NamedSharding(
            sharding.device_mesh, PartitionSpec(*sharding.weight_axes(shape, *dims))
        )
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)
    placed = sharding.activation_sharding(TOKENS, "batch", "seq", "embed")
    return jax.ShapeDtypeStruct(TOKENS, jnp.float32, sharding=placed), weights


def sharding_with_rules(mesh: str, *rules: str) -> ExpertSharding:
    """Return the sharding of the experts on a mesh."""
    sharding = make_sharding_context(parse_mesh(mesh), merge_rules(rules))
    x, weights = array_shapes(sharding)
    return expert_sharding(x, {name: weights[name] for name in STACKED}, sharding)


@pytest.mark.parametrize(
    ("rules", "up_axes", "gathers"),
    [
        ((), ((), ("mp",), ("fsdp",)), True),
        (("embed=none",), ((), ("mp",), ()), False),
        (("experts=mp",), (("mp",), (), ("fsdp",)), True),
        (("experts=mp", "embed=none"), (("mp",), (), ()), False),
        (("experts=fsdp",), ((), ("mp",), ()), False),
        (("mlp=fsdp+mp",), ((), ("fsdp", "mp"), ()), True),
        (("mlp=none", "embed=fsdp+mp"), ((), (), ("fsdp",)), True),
    ],
)
def test_expert_sharding_splits_matrices_by_the_rules(
    rules: tuple[str, ...], up_axes: tuple[MeshAxes, ...], gathers: bool
):
    """A stack of experts that is split like the tokens is gathered before the layer."""
    shards = sharding_with_rules("1,2,4", *rules)
    assert shards.token_axes == ("fsdp",)
    assert shards.weight_axes["up.weight"] == up_axes
    assert shards.weight_axes["down.weight"] == (up_axes[0], up_axes[2], up_axes[1])
    assert shards.gathers_experts == gathers


def test_num_expert_shards_is_the_size_of_the_mesh_axis():
    assert sharding_with_rules("1,2,4", "experts=mp").num_expert_shards == 4


def test_compiler_gathers_one_expert_and_no_tokens():
    sharding, arch_config = make_sharding_context(parse_mesh("1,2,4")), make_moe_arch(2)

    def loss(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        tree = cast(MoeWeights, unflatten_tree(weights))
        return jnp.square(moe_mlp(x, tree, arch_config, sharding)).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*array_shapes(sharding)).compile().as_text() or ""
    gathered = {*re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)}
    assert gathered == {
        f"{SHARDED_F // 4},{SHARDED_D}",
        f"{SHARDED_D},{SHARDED_F // 4}",
        f"{SHARDED_EXPERTS},{SHARDED_D}",
    }, "gate and up, down, router"
