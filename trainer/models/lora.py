"""Low-rank adapters (LoRA, arXiv:2106.09685): their leaves, and the names of their tensors in PEFT's files.

An adapter adds scaling * B A to the weight of a projection. Both matrices are leaves next to the
weight, `lora_a` and `lora_b`, with axis-map rows to the tensors of PEFT. The weight's
row determines theirs:

    layers heads head_dim embed <- layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed

    layers lora_rank embed
        <- layers.{layers}.self_attn.q_proj.lora_A.weight: lora_rank embed
    layers heads head_dim lora_rank
        <- layers.{layers}.self_attn.q_proj.lora_B.weight: (heads head_dim) lora_rank

Projections that a checkpoint stores as one tensor, such as GPT-2's queries, keys and values, have
one matrix A. No I/O, no jax.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.models.axis_map import LAYER_ATOMS, LAYERS
from trainer.models.errors import GET_AGAIN_HINT, PrepError, usage_error
from trainer.models.param_tree import ParamLeaf, param_leaves
from trainer.models.parameters import (
    EMBEDDING_PATH_PARTS,
    MAX_AXIS_SIZE,
    VERBATIM,
    Family,
    HFConfig,
    Parameter,
    active_parameters,
)
from trainer.models.registry import family_of
from trainer.models.rows import atoms_in, split_dims, split_row
from trainer.models.suggest import suggest
from trainer.models.text_part import with_prefixes
from trainer.models.verbatim import recorded_family

RANK_ATOM = "lora_rank"
# Last path parts of the leaves.
LORA_A = "lora_a"
LORA_B = "lora_b"
PEFT_PREFIX = "base_model.model."
# Modules around the text model in classes of transformers. They depend on the class and on the version:
# `model.layers.0`, `language_model.model.layers.0`, `model.language_model.layers.0`, `model.text_model.layers.0`.
WRAPPER_MODULES = frozenset(("model", "language_model", "text_model"))
DEFAULT_TARGETS = ("attn.q", "attn.v")
# Usual name of a projection -> its name in latent attention, where one tensor gives the keys and values of all heads.
LATENT_PROJECTIONS = {"attn.q": "attn.q_up", "attn.k": "attn.kv_up", "attn.v": "attn.kv_up"}
WEIGHT = ".weight"
# Far above any setting. Larger numbers overflow float32.
MAX_ALPHA = 1e30


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of adapters.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale of the update before it is divided by the rank.
        targets: Patterns of projections, such as `attn.q` or `mlp.*`.
        use_rslora: Divide by the square root of the rank instead (arXiv:2312.03732).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = DEFAULT_TARGETS
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def lora_from_manifest(manifest: Mapping[str, Any]) -> LoraConfig | None:
    """Return the settings of adapters in a manifest, or None if it has none.

    Raises:
        PrepError: They are invalid.
    """
    lora = manifest.get("lora")
    if lora is None:
        return None
    if not _is_lora_config(lora):
        what = "the manifest has invalid settings of adapters"
        raise PrepError(what, f"`lora` is {ascii(lora)[:60]}", GET_AGAIN_HINT)
    return LoraConfig(
        lora["rank"],
        float(lora["alpha"]),
        targets=tuple(lora["targets"]),
        use_rslora=lora["use_rslora"],
    )


def _is_lora_config(value: Any) -> bool:
    """Return whether a value of a manifest has the keys of a `LoraConfig`, of its types and in its ranges."""
    if not isinstance(value, Mapping):
        return False
    rank = value.get("rank")
    alpha = value.get("alpha")
    targets = value.get("targets")
    is_rank = isinstance(rank, int) and not isinstance(rank, bool) and 1 <= rank <= MAX_AXIS_SIZE
    is_alpha = (
        isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha <= MAX_ALPHA
    )
    is_targets = isinstance(targets, Sequence) and all(
        isinstance(target, str) for target in targets
    )
    return is_rank and is_alpha and is_targets and isinstance(value.get("use_rslora"), bool)


def manifest_family(manifest: Mapping[str, Any]) -> Family:
    """Return the family of a checkpoint's parameters: of the model, of its adapters, or of verbatim tensors."""
    if manifest.get("family") == VERBATIM:
        return recorded_family(manifest)
    config = manifest["config"]
    lora = lora_from_manifest(manifest)
    family = family_of(config)
    # Adapters have the names of the text model alone.
    if lora is not None:
        return lora_family(family, config, lora)
    if towers := manifest.get("towers"):
        return with_prefixes(
            family, _read_prefix(towers, "prefix"), _read_prefix(towers, "head_prefix")
        )
    return family


def _read_prefix(towers: Mapping[str, Any], key: str) -> str:
    """Return a prefix of tensor names in a manifest."""
    prefix = towers.get(key)
    if not isinstance(prefix, str):
        why = f"`towers` has the {key} {prefix!r:.60}"
        raise PrepError("the manifest is invalid", why, GET_AGAIN_HINT)
    return prefix


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection that can have an adapter.

    Attributes:
        path: Path in the tree, such as `layers.attn.q`.
        name: Path below the layers, such as `attn.q`.
        module: Name of the PyTorch module with the layer atom in braces.
        stack: Atom of the layers.
        out_dim: Output dim of the weight in its tensor.
        in_dim: Input dim of the weight in its tensor.
        out_dims: Output dims of the leaf, in order.
        in_dims: Input dims of the leaf, in order.
        is_transposed: Whether the tensor is stored as [in, out].
    """

    path: str
    name: str
    module: str
    stack: str
    out_dim: str
    in_dim: str
    out_dims: tuple[str, ...]
    in_dims: tuple[str, ...]
    is_transposed: bool

    @property
    def lora_a_row(self) -> str:
        """Axis map of the LoRA matrix A."""
        leaf = " ".join((self.stack, RANK_ATOM, *self.in_dims))
        return f"{leaf} <- {self.module}.lora_A.weight: {RANK_ATOM} {self.in_dim}"

    @property
    def lora_b_row(self) -> str:
        """Axis map of the LoRA matrix B."""
        leaf = " ".join((self.stack, *self.out_dims, RANK_ATOM))
        return f"{leaf} <- {self.module}.lora_B.weight: {self.out_dim} {RANK_ATOM}"


def projections(family: Family, config: HFConfig) -> Iterator[Projection]:
    """Yield the projections of a model's layers that can have an adapter. Projections of experts cannot."""
    for path, parameter in active_parameters(family.parameters, config):
        if projection := _projection(path, parameter):
            yield projection


def _projection(path: str, parameter: Parameter) -> Projection | None:
    """Return the projection of a parameter, or None if the parameter is not the matrix of one."""
    leaf, tensor, dims = split_row(parameter.row)
    # E.g. `layers embed heads head_dim <- …: embed (heads head_dim)` for the output projection. A leaf
    # has its output dims first, so the output dim is `embed` and the input dim `(heads head_dim)`. A dim of a leaf may
    # have several atoms, e.g. `(head_shards shard_heads)`, all of them in one dim of the tensor.
    stack, *leaf_dims = split_dims(leaf) or [""]
    tensor_dims = split_dims(dims)
    is_matrix = path.endswith(WEIGHT) and tensor.endswith(WEIGHT) and len(tensor_dims) == 2
    is_embedding = not EMBEDDING_PATH_PARTS.isdisjoint(path.split("."))
    if stack not in LAYER_ATOMS or not is_matrix or is_embedding or "experts" in leaf_dims:
        return None
    out_dim = next(dim for dim in tensor_dims if _has_dim(dim, leaf_dims[0]))
    in_dim = tensor_dims[1 - tensor_dims.index(out_dim)]
    return Projection(
        path=path.removesuffix(WEIGHT),
        name=path.removesuffix(WEIGHT).partition(f"{LAYERS}.")[2],
        module=tensor.removesuffix(WEIGHT),
        stack=stack,
        out_dim=out_dim,
        in_dim=in_dim,
        out_dims=tuple(dim for dim in leaf_dims if _has_dim(out_dim, dim)),
        in_dims=tuple(dim for dim in leaf_dims if _has_dim(in_dim, dim)),
        is_transposed=tensor_dims.index(out_dim) == 1,
    )


def _has_dim(tensor_dim: str, leaf_dim: str) -> bool:
    """Return whether a dim of a tensor has the atoms of a dim of a leaf, e.g. `(heads head_dim)` has `heads`."""
    return not set(atoms_in(leaf_dim)).isdisjoint(atoms_in(tensor_dim))


def split_wrappers(name: str, family: Family) -> tuple[str, str]:
    """Split a name into the modules around the text model and the rest.

    Args:
        name: Name of a module or tensor, without the prefix of PEFT.
        family: Family of the text model. The parts of its prefix are wrappers, too.

    Returns:
        The wrappers with their dots, and the rest, e.g. `model.language_model.` and `layers.0.self_attn.q_proj`. Names
        of towers keep their first module, e.g. `model.` and `vision_tower.encoder.layers.0`.
    """
    wrappers = WRAPPER_MODULES.union(family.prefix.split("."))
    parts = name.split(".")
    count = 0
    while count < len(parts) - 1 and parts[count] in wrappers:
        count += 1
    return "".join(f"{part}." for part in parts[:count]), ".".join(parts[count:])


def select_targets(family: Family, config: HFConfig, targets: Sequence[str]) -> list[Projection]:
    """Return the projections with an adapter: each that matches a pattern, and all that share its tensor.

    In latent attention `attn.q` selects the last projection of queries, and `attn.k` and `attn.v` select `attn.kv_up`.

    Raises:
        UsageError: A pattern matches no projection of the model.
    """
    every = list(projections(family, config))
    matching: set[str] = set()
    for pattern in targets:
        modules = _matching_modules(every, pattern)
        if not modules and pattern in LATENT_PROJECTIONS:
            modules = _matching_modules(every, LATENT_PROJECTIONS[pattern])
        if not modules:
            raise _unknown_target_error(family, every, pattern)
        matching |= modules
    return [projection for projection in every if projection.module in matching]


def _matching_modules(every: Sequence[Projection], pattern: str) -> set[str]:
    """Return the modules of the projections that match a pattern."""
    # `fnmatchcase`, because `fnmatch` ignores case on Windows.
    return {p.module for p in every if fnmatch.fnmatchcase(p.name, pattern)}


def _unknown_target_error(family: Family, every: Sequence[Projection], pattern: str) -> PrepError:
    """Return the error of a target that no projection has. It suggests one, also for a name of a PyTorch module."""
    # Users of PEFT write names such as q_proj. Each maps to the name of the projection here.
    names = {projection.name: projection.name for projection in every}
    for projection in every:
        names.setdefault(projection.module.rpartition(".")[2], projection.name)
    meant = suggest(pattern[:60], names)
    hint = "" if meant is None else f"did you mean `{names[meant]}`?"
    why = f"{family.name} has the projections {', '.join(dict.fromkeys(names.values()))}"
    return usage_error(f"unknown projection {pattern!r:.60} in `lora.targets`", why, hint)


def lora_family(family: Family, config: HFConfig, lora: LoraConfig) -> Family:
    """Return a family of the adapters of a model. Its tensors have the names of PEFT."""
    parameters: dict[str, Parameter] = {}
    modules: set[str] = set()
    for projection in select_targets(family, config, lora.targets):
        # Queries, keys and values of one tensor are one module of PEFT: one A, and the rows of one B.
        if projection.module not in modules:
            parameters[f"{projection.path}.{LORA_A}"] = Parameter(projection.lora_a_row)
        modules.add(projection.module)
        parameters[f"{projection.path}.{LORA_B}"] = Parameter(projection.lora_b_row)
    return dataclasses.replace(
        family,
        prefix=PEFT_PREFIX + family.prefix,
        unprefixed=(),
        sizes=lambda config: family.sizes(config) | {RANK_ATOM: lora.rank},
        parameters=parameters,
        dropped={},
        layouts={},
        duplicates={},
    )


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        config: Their settings.
        leaves: Their leaves, by path.
        shared: Path of each A matrix that reuses the A of another projection -> path of the reused leaf.
    """

    config: LoraConfig
    leaves: Mapping[str, ParamLeaf]
    shared: Mapping[str, str]


def build_adapters(
    family: Family, config: HFConfig, lora: LoraConfig, *, scan: bool = True, scan_axis: int = 0
) -> Adapters:
    """Return the adapters of a model.

    Args:
        family: Family of the model.
        config: Content of its config.json.
        lora: Settings of the adapters.
        scan: Whether each leaf stacks all layers.
        scan_axis: Axis of the stacked layers.

    Raises:
        UsageError: A target is unknown.
    """
    leaves = param_leaves(
        lora_family(family, config, lora), config, True, scan=scan, scan_axis=scan_axis
    )
    # Module -> the first projection of the module. All projections of a module share one matrix A.
    owners: dict[str, Projection] = {}
    shared: dict[str, str] = {}
    for projection in select_targets(family, config, lora.targets):
        owner = owners.setdefault(projection.module, projection)
        for leaf in leaves.values() if owner != projection else ():
            if _stacked_path(leaf) == f"{projection.path}.{LORA_B}":
                layer = leaf.path.removesuffix(f"{projection.name}.{LORA_B}")
                shared[f"{layer}{projection.name}.{LORA_A}"] = f"{layer}{owner.name}.{LORA_A}"
    return Adapters(lora, leaves, shared)


def _stacked_path(leaf: ParamLeaf) -> str:
    """Return the path that the leaf has if layers are stacked."""
    return re.sub(r"\{\w+\}\.", "", leaf.path_pattern)


def module_suffixes(family: Family, config: HFConfig, lora: LoraConfig) -> list[str]:
    """Return the shortest ends of module names that select only the adapted modules, as PEFT matches them."""
    adapted = {_module_pattern(p.module) for p in select_targets(family, config, lora.targets)}
    others = {_module_pattern(name) for name in _module_names(family, config)} - adapted
    return sorted({_shortest_suffix(module, others) for module in adapted})


def _module_names(family: Family, config: HFConfig) -> Iterator[str]:
    for _, parameter in active_parameters(family.parameters, config):
        yield split_row(parameter.row)[1].removesuffix(WEIGHT)


def _module_pattern(module: str) -> str:
    """Return a module's name without the numbers of layers and experts."""
    return ".".join(part for part in module.split(".") if not part.startswith("{"))


def _shortest_suffix(module: str, others: Collection[str]) -> str:
    """Return the shortest end of a module's name that no other module shares."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        suffix = ".".join(parts[-count:])
        # PEFT adapts a module if its name equals a target or ends with a dot and the target. For T5,
        # `q` would also select EncDecAttention, so that `attn.q` becomes SelfAttention.q.
        if not any(f".{other}".endswith(f".{suffix}") for other in others):
            return suffix
    return module
