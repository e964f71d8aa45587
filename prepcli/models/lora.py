"""Low-rank adapters (LoRA, arXiv:2106.09685): their leaves, and the names of their tensors in PEFT's files.

An adapter adds scaling * B A to the weight of a projection. Both matrices are leaves next to the weight, `lora_a` and
`lora_b`, with axis-map rows to the tensors of PEFT. The weight's row determines theirs:

    layers heads head_dim embed <- layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed

    layers lora_rank embed
        <- layers.{layers}.self_attn.q_proj.lora_A.weight: lora_rank embed
    layers heads head_dim lora_rank
        <- layers.{layers}.self_attn.q_proj.lora_B.weight: (heads head_dim) lora_rank

Projections that a checkpoint stores as one tensor, such as GPT-2's queries, keys and values, have one matrix A.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.axis_map import LAYER_ATOMS, LAYERS, bind_row, number_tensors
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.formatting import suggest
from prepcli.models.declaration import atoms_in, split_dims, split_row
from prepcli.models.lora_config import LoraConfig, find_pattern
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import (
    EMBEDDING_PATH_PARTS,
    Family,
    HFConfig,
    Parameter,
    active_parameters,
)

RANK_ATOM = "lora_rank"
# Last path parts of the leaves.
LORA_A = "lora_a"
LORA_B = "lora_b"
PEFT_PREFIX = "base_model.model."
# Target of all projections except those of experts, as PEFT's `target_modules` of this name.
ALL_LINEAR = "all-linear"
# Usual name of a projection -> its name in latent attention, where one tensor gives the keys and values of all heads.
LATENT_PROJECTIONS = {"attn.q": "attn.q_up", "attn.k": "attn.kv_up", "attn.v": "attn.kv_up"}
WEIGHT = ".weight"
EXPERTS = "experts"
# Module of PEFT inside the module that adapts a later parameter of the same experts.
BASE_LAYER = "base_layer."
# First path parts of the modules that can be trained as a whole.
EMBED = "embed"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection that can have an adapter."""

    path: str  # Path in the tree, such as `layers.attn.q`.
    name: str  # Path below the layers, such as `attn.q`.
    module: str  # Name of the PyTorch module with the layer atom in braces.
    # Name of the parameter in the module: `weight`, or e.g. `gate_up_proj` of fused experts.
    parameter: str
    stack: str  # Atom of the layers.
    out_dim: str  # Output dim of the weight in its tensor.
    in_dim: str  # Input dim of the weight in its tensor.
    out_dims: tuple[str, ...]  # Output dims of the leaf, in order.
    in_dims: tuple[str, ...]  # Input dims of the leaf, in order.
    is_transposed: bool  # Whether the tensor is stored as [in, out].
    has_experts: bool = False  # Whether it is a stack of the projections of all experts.

    @property
    def stack_path(self) -> str:
        """Path of the layers in the tree, such as `layers` or `encoder.layers`."""
        return self.path.removesuffix(f".{self.name}")

    @property
    def tensor(self) -> str:
        """Name of the weight, which projections in one tensor share."""
        return f"{self.module}.{self.parameter}"

    def lora_a_row(self, rank_atom: str, nesting: str = "") -> str:
        """Return the axis map of the LoRA matrix A.

        `nesting` are the modules between the module and the matrix, in the names of PEFT.
        """
        tensor = f"{self.module}.{nesting}lora_A.weight"
        if self.has_experts:
            leaf = " ".join((self.stack, EXPERTS, rank_atom, *self.in_dims))
            return f"{leaf} <- {tensor}: ({EXPERTS} {rank_atom}) {self.in_dim}"
        leaf = " ".join((self.stack, rank_atom, *self.in_dims))
        return f"{leaf} <- {tensor}: {rank_atom} {self.in_dim}"

    def lora_b_row(self, rank_atom: str, nesting: str = "") -> str:
        """Return the axis map of the LoRA matrix B. The arguments are those of `lora_a_row`."""
        tensor = f"{self.module}.{nesting}lora_B.weight"
        if self.has_experts:
            # The columns of PEFT have the expert inside of the rank, unlike the rows of A.
            leaf = " ".join((self.stack, EXPERTS, *self.out_dims, rank_atom))
            return f"{leaf} <- {tensor}: {self.out_dim} ({rank_atom} {EXPERTS})"
        leaf = " ".join((self.stack, *self.out_dims, rank_atom))
        return f"{leaf} <- {tensor}: {self.out_dim} {rank_atom}"


def projections(family: Family, config: HFConfig) -> Iterator[Projection]:
    """Yield the projections of a model's layers that can have an adapter, without the experts."""
    for path, parameter in active_parameters(family.parameters, config):
        projection = _projection(path, parameter.row)
        if projection and not projection.has_experts:
            yield projection


def expert_projections(family: Family, config: HFConfig) -> Iterator[Projection]:
    """Yield the projections of experts that the class of transformers stores as one tensor of all experts."""
    for path, parameter in active_parameters(family.parameters, config):
        # A file may have a tensor per expert. The class has the tensor of the alternate row then.
        for row in (parameter.row, parameter.alternate):
            projection = _projection(path, row)
            if projection and projection.has_experts:
                yield projection
                break


def _projection(path: str, row: str) -> Projection | None:
    """Return the projection of a parameter, or that of all experts, or None if it is not the matrix of one."""
    leaf, tensor, dims = split_row(row)
    # E.g. `layers embed heads head_dim <- …: embed (heads head_dim)` for the output projection. A leaf
    # has its output dims first, so the output dim is `embed` and the input dim `(heads head_dim)`. A dim of a leaf may
    # have several atoms, e.g. `(head_shards shard_heads)`, all of them in one dim of the tensor.
    stack, *leaf_dims = split_dims(leaf) or [""]
    tensor_dims = split_dims(dims)
    has_experts = leaf_dims[:1] == [EXPERTS] == tensor_dims[:1]
    if has_experts:
        leaf_dims = leaf_dims[1:]
        tensor_dims = tensor_dims[1:]
    elif not tensor.endswith(WEIGHT) or not EMBEDDING_PATH_PARTS.isdisjoint(path.split(".")):
        return None
    is_matrix = path.endswith(WEIGHT) and len(tensor_dims) == 2
    if stack not in LAYER_ATOMS or not is_matrix or EXPERTS in leaf_dims:
        return None
    # A leaf of one output feature has only input dims, e.g. `embed <- …: 1 embed`.
    out_dim = "1"
    if out_dim not in tensor_dims:
        out_dim = next(dim for dim in tensor_dims if _has_dim(dim, leaf_dims[0]))
    in_dim = tensor_dims[1 - tensor_dims.index(out_dim)]
    module, _, parameter = tensor.rpartition(".")
    return Projection(
        path=path.removesuffix(WEIGHT),
        name=path.removesuffix(WEIGHT).partition(f"{LAYERS}.")[2],
        module=module,
        parameter=parameter,
        stack=stack,
        out_dim=out_dim,
        in_dim=in_dim,
        out_dims=tuple(dim for dim in leaf_dims if _has_dim(out_dim, dim)),
        in_dims=tuple(dim for dim in leaf_dims if _has_dim(in_dim, dim)),
        is_transposed=tensor_dims.index(out_dim) == 1,
        has_experts=has_experts,
    )


def _has_dim(tensor_dim: str, leaf_dim: str) -> bool:
    """Return whether a dim of a tensor has the atoms of a dim of a leaf, e.g. `(heads head_dim)` has `heads`."""
    return not set(atoms_in(leaf_dim)).isdisjoint(atoms_in(tensor_dim))


def select_targets(family: Family, config: HFConfig, targets: Sequence[str]) -> list[Projection]:
    """Return the projections with an adapter: each that matches a pattern, and all that share its tensor.

    In latent attention `attn.q` selects the last projection of queries, and `attn.k` and `attn.v` select `attn.kv_up`.

    Raises:
        UsageError: A pattern matches no projection of the model.
    """
    every = list(projections(family, config))
    return _select(every, targets, family, key="lora.targets")


def adapted_projections(family: Family, config: HFConfig, lora: LoraConfig) -> list[Projection]:
    """Return the projections with an adapter, and then those of experts.

    Raises:
        UsageError: A pattern of `targets` or `target_parameters` matches no projection of the model.
    """
    selected = select_targets(family, config, lora.targets)
    experts = list(expert_projections(family, config))
    if lora.target_parameters and not experts:
        why = f"{family.name} has no experts in one tensor"
        raise usage_error("`lora.target_parameters` is not supported", why, "remove the key")
    return selected + _select(experts, lora.target_parameters, family, key="lora.target_parameters")


def _select(
    every: Sequence[Projection], targets: Sequence[str], family: Family, *, key: str
) -> list[Projection]:
    """Return the projections with the tensors that match patterns. `key` is the key of the recipe, for errors."""
    matching: set[str] = set()
    for pattern in targets:
        tensors = _matching_tensors(every, pattern)
        if not tensors and pattern in LATENT_PROJECTIONS:
            tensors = _matching_tensors(every, LATENT_PROJECTIONS[pattern])
        if not tensors:
            raise _unknown_target_error(family, every, pattern, key)
        matching |= tensors
    return [projection for projection in every if projection.tensor in matching]


def _matching_tensors(every: Sequence[Projection], pattern: str) -> set[str]:
    """Return the tensors of the projections that match a pattern."""
    # `fnmatchcase`, because `fnmatch` ignores case on Windows.
    return {
        p.tensor for p in every if pattern == ALL_LINEAR or fnmatch.fnmatchcase(p.name, pattern)
    }


def _unknown_target_error(
    family: Family, every: Sequence[Projection], pattern: str, key: str
) -> PrepError:
    """Return the error of a target that no projection has. It suggests one, also for a name of a PyTorch module."""
    # Users of PEFT write names such as q_proj. Each maps to the name of the projection here.
    names = {projection.name: projection.name for projection in every}
    for projection in every:
        module = projection.tensor.removesuffix(WEIGHT)
        names.setdefault(module.rpartition(".")[2], projection.name)
    meant = suggest(pattern[:60], names)
    hint = "" if meant is None else f"did you mean `{names[meant]}`?"
    why = f"{family.name} has the projections {', '.join(dict.fromkeys(names.values()))}"
    return usage_error(f"unknown projection {pattern!r:.60} in `{key}`", why, hint)


def saved_modules(family: Family, config: HFConfig) -> dict[str, list[str]]:
    """Return the embeddings and the head that can be trained as a whole.

    Returns:
        Name, e.g. `embed.tokens` or `head` -> paths of its parameters. Empty for an encoder-decoder model, where a
        module of PEFT has a part of the uses of an embedding.
    """
    modules: dict[str, list[str]] = {}
    if family.arch_config(config).encoder is not None:
        return modules
    for path, parameter in active_parameters(family.parameters, config):
        first, *rest = path.split(".")
        is_weight = split_row(parameter.row)[1].endswith(WEIGHT)
        if first == EMBED and len(rest) == 1 and is_weight:
            modules[path] = [path]
        elif first == HEAD:
            modules.setdefault(HEAD, []).append(path)
    return modules


def _select_saved(family: Family, config: HFConfig, lora: LoraConfig) -> list[str]:
    """Return the paths of the parameters that are trained as a whole.

    Raises:
        UsageError: A module is unknown.
    """
    modules = saved_modules(family, config)
    paths: list[str] = []
    for name in lora.modules_to_save:
        if name not in modules:
            # Users of PEFT write names such as embed_tokens.
            names = {module: module for module in modules}
            for module, module_paths in modules.items():
                names.setdefault(saved_module_name(family, module_paths[0]), module)
            meant = suggest(name[:60], names)
            hint = "" if meant is None else f"did you mean `{names[meant]}`?"
            why = f"{family.name} has {', '.join(modules) or 'none that can be trained as a whole'}"
            raise usage_error(f"unknown module {name!r:.60} in `lora.modules_to_save`", why, hint)
        paths += modules[name]
    if HEAD in lora.modules_to_save and family.is_tied(config):
        why = f"the head of {family.name} with this config is the token embedding"
        hint = '`modules_to_save = ["embed.tokens"]` trains both'
        raise usage_error("`lora.modules_to_save` has a tied head", why, hint)
    return paths


def saved_module_name(family: Family, path: str) -> str:
    """Return the name of the PyTorch module of a parameter, without the prefix of its class."""
    return split_row(family.parameters[path].row)[1].rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """The settings of the adapter of one tensor."""

    rank: int  # Its rank.
    alpha: float  # Its alpha.
    nesting: str = ""  # Modules between its module and its matrices, in the names of PEFT.


def with_named_patterns(family: Family, config: HFConfig, lora: LoraConfig) -> LoraConfig:
    """Return settings with the names of projections in place of the patterns of an adapter's file.

    The patterns of a file are for the names of its class, which may differ from those of the base.
    """
    settings = module_settings(family, config, lora, allow_unused=True)
    selected = adapted_projections(family, config, lora)
    # Tensor -> its projections, and their names in their first layer.
    members: dict[str, list[Projection]] = {}
    for projection in selected:
        members.setdefault(projection.tensor, []).append(projection)
    names = {key: next(_names_by_layer(family, config, members[key])) for key in members}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for tensor, module in settings.items():
        projection = members[tensor][0]
        others = [name for other, values in names.items() if other != tensor for name in values]
        pattern = _pattern_of(projection, others)
        if module.rank != lora.rank:
            ranks[pattern] = module.rank
        if module.alpha != lora.alpha:
            alphas[pattern] = module.alpha
    return dataclasses.replace(lora, rank_pattern=ranks, alpha_pattern=alphas)


def _pattern_of(projection: Projection, others: Sequence[str]) -> str:
    """Return the name of a projection, or a pattern with its stack of layers if the name matches one of `others`."""
    name = projection.name
    if find_pattern([name], others) is None:
        return name
    # E.g. `attn.q` of an encoder and of a decoder.
    return rf"^{re.escape(projection.stack_path)}\.\d+\.{re.escape(name)}"


def module_settings(
    family: Family, config: HFConfig, lora: LoraConfig, *, allow_unused: bool = False
) -> dict[str, ModuleSettings]:
    """Return the settings of each tensor with an adapter, by `Projection.tensor`.

    A pattern of `rank_pattern` or `alpha_pattern` is compared with the names of PyTorch modules in the class, e.g.
    `model.layers.0.self_attn.q_proj`, and with names here, e.g. `layers.0.attn.q`. With `allow_unused`, a pattern may
    match no adapter.

    Raises:
        UsageError: A target is unknown, a pattern matches no adapter, or the layers of a projection differ in rank
            or alpha.
    """
    selected = adapted_projections(family, config, lora)
    unused = {*lora.rank_pattern, *lora.alpha_pattern}
    shadowed: set[str] = set()
    settings: dict[str, ModuleSettings] = {}
    for projection in selected:
        if projection.tensor in settings:
            continue
        members = [p for p in selected if p.tensor == projection.tensor]
        found: set[tuple[str | None, str | None]] = set()
        if lora.rank_pattern or lora.alpha_pattern:
            for names in _names_by_layer(family, config, members):
                rank_key = find_pattern(lora.rank_pattern, names)
                found.add((rank_key, find_pattern(lora.alpha_pattern, names)))
                # Later keys agree, e.g. those of `attn.q` and `attn.k` in one tensor, or have no effect.
                for patterns in (lora.rank_pattern, lora.alpha_pattern):
                    matching = [key for key in patterns if find_pattern([key], names) is not None]
                    agreeing = [key for key in matching if patterns[key] == patterns[matching[0]]]
                    unused -= {*agreeing}
                    shadowed |= {*matching} - {*agreeing}
        values = {
            (
                lora.rank_pattern.get(rank or "", lora.rank),
                lora.alpha_pattern.get(alpha or "", lora.alpha),
            )
            for rank, alpha in found or {(None, None)}
        }
        if len(values) > 1:
            raise _unequal_layers_error(projection, values)
        ((rank, alpha),) = values
        settings[projection.tensor] = ModuleSettings(rank, alpha, _nesting(projection, selected))
    if unused and not allow_unused:
        names = ", ".join(dict.fromkeys(projection.name for projection in selected))
        why = f"it matches none of the adapters: {names}"
        if min(unused) in shadowed:
            why = "all adapters that it matches have the value of an earlier key"
        raise usage_error(
            f"{min(unused)!r:.60} in `lora.rank_pattern` or `lora.alpha_pattern`", why, ""
        )
    return settings


def _unequal_layers_error(projection: Projection, values: Iterable[tuple[int, float]]) -> PrepError:
    """Return the error of layers with different ranks or alphas."""
    texts = " and ".join(f"rank {rank} with alpha {alpha:g}" for rank, alpha in sorted(values))
    what = f"adapters of {projection.name} with settings by layer are not supported"
    why = f"its layers have {texts}, and one leaf has all of them"
    return usage_error(what, why, "give all layers of a projection one rank and one alpha")


def _names_by_layer(
    family: Family, config: HFConfig, members: Sequence[Projection]
) -> Iterator[list[str]]:
    """Yield the names of the projections of one tensor in each layer: of the module, and of each projection."""
    first = members[0]
    for layer_module in layer_names(first.module, first.stack, family, config):
        module = family.prefix + layer_module
        # PEFT compares the name of a parameter of experts with its own name.
        if first.has_experts:
            module = f"{module}.{first.parameter}"
        number = next((part for part in layer_module.split(".") if part.isdigit()), "")
        yield [module, *(f"{p.stack_path}.{number}.{p.name}" for p in members)]


def layer_names(module: str, stack: str, family: Family, config: HFConfig) -> Iterator[str]:
    """Yield the name of a module in each layer, e.g. `layers.0.mlp` of `layers.{layers}.mlp`."""
    row = parse_row(f"{stack} <- {module}: 1")
    numbered = bind_row(number_tensors(row, family.layer_numbers(config)), family.sizes(config))
    for name, _ in numbered.tensors():
        yield name


def nested_module(module: str, projection: Projection, selected: Sequence[Projection]) -> str:
    """Return the name of the module of PEFT with the matrices of a projection of experts.

    `selected` are all projections of experts with adapters.
    """
    return f"{module}.{_nesting(projection, selected)}".rstrip(".")


def _nesting(projection: Projection, selected: Sequence[Projection]) -> str:
    """Return the modules of PEFT around the matrices of a parameter of experts.

    PEFT wraps the module once per parameter, in the order of the class. The last parameter is outside: with
    `gate_up_proj` and `down_proj`, `experts.lora_A` belongs to `down_proj`, and `experts.base_layer.lora_A` to
    `gate_up_proj`.
    """
    if not projection.has_experts:
        return ""
    tensors = list(dict.fromkeys(p.tensor for p in selected if p.module == projection.module))
    return BASE_LAYER * (len(tensors) - 1 - tensors.index(projection.tensor))


def lora_family(family: Family, config: HFConfig, lora: LoraConfig) -> Family:
    """Return a family of the adapters of a model and of its modules trained as a whole, with the names of PEFT.

    Raises:
        UsageError: A setting names a module that the model does not have.
    """
    settings = module_settings(family, config, lora)
    parameters = {path: family.parameters[path] for path in _select_saved(family, config, lora)}
    sizes: dict[str, int] = {}
    tensors: set[str] = set()
    for projection in adapted_projections(family, config, lora):
        module = settings[projection.tensor]
        rank_atom = RANK_ATOM if module.rank == lora.rank else f"{RANK_ATOM}_{module.rank}"
        sizes[rank_atom] = module.rank
        # Queries, keys and values of one tensor are one module of PEFT: one A, and the rows of one B.
        if projection.tensor not in tensors:
            row = projection.lora_a_row(rank_atom, module.nesting)
            parameters[f"{projection.path}.{LORA_A}"] = Parameter(row)
        tensors.add(projection.tensor)
        row = projection.lora_b_row(rank_atom, module.nesting)
        parameters[f"{projection.path}.{LORA_B}"] = Parameter(row)
    return dataclasses.replace(
        family,
        prefix=PEFT_PREFIX + family.prefix,
        head_prefix=PEFT_PREFIX + family.head_prefix,
        sizes=lambda config: family.sizes(config) | sizes,
        parameters=parameters,
        dropped={},
        layouts={},
        duplicates={},
    )


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model."""

    config: LoraConfig  # Their settings.
    # Their leaves, and the leaves of modules that are trained as a whole, by path.
    leaves: Mapping[str, ParamLeaf]
    # Path of each A matrix that reuses the A of another projection -> path of the reused leaf.
    shared: Mapping[str, str]
    scalings: Mapping[str, float]  # Factor of each A matrix in `leaves`, by path.
    # Name of a projection below the layers -> number of its module in the keys of dropout. It depends on the model
    # alone, so that further targets change no mask.
    dropout_sites: Mapping[str, int]

    @property
    def matrices(self) -> dict[str, ParamLeaf]:
        """The matrices A and B, by path."""
        return {path: leaf for path, leaf in self.leaves.items() if path.endswith((LORA_A, LORA_B))}


def build_adapters(
    family: Family,
    config: HFConfig,
    lora: LoraConfig,
    *,
    is_tied: bool = True,
    scan: bool = True,
    scan_axis: int = 0,
) -> Adapters:
    """Return the adapters of a model.

    Raises:
        UsageError: A target is unknown.
    """
    adapter_family = lora_family(family, config, lora)
    leaves = param_leaves(adapter_family, config, is_tied, scan=scan, scan_axis=scan_axis)
    settings = module_settings(family, config, lora)
    # Tensor -> its first projection. All projections of a tensor share one matrix A.
    owners: dict[str, Projection] = {}
    shared: dict[str, str] = {}
    scalings: dict[str, float] = {}
    for projection in adapted_projections(family, config, lora):
        owner = owners.setdefault(projection.tensor, projection)
        module = settings[projection.tensor]
        for leaf in leaves.values():
            stacked_path = re.sub(r"\{\w+\}\.", "", leaf.path_pattern)
            if stacked_path != f"{projection.path}.{LORA_B}":
                continue
            layer = leaf.path.removesuffix(f"{projection.name}.{LORA_B}")
            path = f"{layer}{owner.name}.{LORA_A}"
            scalings[path] = lora.scaling_of(module.rank, module.alpha)
            if owner != projection:
                shared[f"{layer}{projection.name}.{LORA_A}"] = path
    return Adapters(lora, leaves, shared, scalings, _dropout_sites(family, config))


def _dropout_sites(family: Family, config: HFConfig) -> dict[str, int]:
    """Return the number of the module of each projection. Projections in one tensor are one module."""
    every = list(projections(family, config))
    names = list(dict.fromkeys(projection.name for projection in every))
    first_names: dict[str, str] = {}
    sites: dict[str, int] = {}
    for projection in every:
        first_name = first_names.setdefault(projection.tensor, projection.name)
        sites[projection.name] = names.index(first_name)
    return sites


def rank_axis(leaf: ParamLeaf) -> int:
    """Return the axis of the rank of a matrix of an adapter."""
    return next(n for n, dim in enumerate(leaf.dims) if dim and dim[0].startswith(RANK_ATOM))


def num_features(leaf: ParamLeaf) -> int:
    """Return the input features of an adapter's A, or the output features of its B."""
    # Each layer and each expert has matrices of its own.
    others = (leaf.stack_axis, rank_axis(leaf))
    axes = (n for n, dim in enumerate(leaf.dims) if n not in others and dim != (EXPERTS,))
    return math.prod(leaf.shape[n] for n in axes)
