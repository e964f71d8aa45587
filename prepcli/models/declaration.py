"""A family as one declaration: its parameters, its sizes, and the choices of its layers. No I/O, no jax.

A choice is a field of `ArchConfig`: a value, or a function of the config and the sizes. The fields of a config that a
family supports are the ones that it reads: another field with an effect on some decoder of transformers is refused.

A reader of a config raises PrepError for a value that is invalid or not supported.

A row ties a leaf of the parameter tree to source tensors. `prepcli.algebra.axis_map` defines the notation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.layer_config import ATTENTION_DROPOUT, DropoutFields
from prepcli.models.parameters import (
    ALWAYS,
    NEVER,
    Condition,
    Family,
    Parameter,
    WeightTying,
    condition_holds,
)

# Path in the tree -> parameter.
Parameters = dict[str, Parameter]
# Fields of a parameter with a row
ROW_FORMS = ("row", "alternate", "else_row", "transposed")


def embedding(path: str, row: str) -> Parameters:
    """Return the parameter of an embedding of tokens or positions."""
    return {f"embed.{path}": Parameter(row)}


def matrix(
    path: str, row: str, alternate: str = "", condition: Condition = ALWAYS, else_row: str = ""
) -> Parameters:
    """Return the parameter of a weight without bias, with the options of `Parameter`."""
    return {
        f"{path}.weight": Parameter(
            row, condition=condition, alternate=alternate, else_row=else_row
        )
    }


def linear(path: str, row: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return the parameters of a weight and its bias.

    Args:
        path: Path of both in the tree.
        row: Row of the weight, stored as [out, in] or [in, out]. Its leaf begins with the output
            dims. They are the dims of the bias.
        bias: When the bias exists, or NEVER.
    """
    parameters = {f"{path}.weight": Parameter(row)}
    if bias is None:
        return parameters
    # Example: `heads head_dim embed <- q.weight: (heads head_dim) embed`. The first atom of the leaf is
    # in the dim (heads head_dim), so the row of the bias is
    # `heads head_dim <- q.bias: (heads head_dim)`.
    leaf, name, dims = split_row(row)
    shared = set(leaf.split()) & set(atoms_in(dims))
    first = next(atom for atom in leaf.split() if atom in shared)
    out_dim = next(dim for dim in split_dims(dims) if first in atoms_in(dim))
    kept = set(atoms_in(out_dim))
    bias_leaf = " ".join(atom for atom in leaf.split() if atom in kept or atom not in shared)
    bias_row = f"{bias_leaf} <- {name.removesuffix('weight')}bias: {out_dim}"
    parameters[f"{path}.bias"] = Parameter(bias_row, bias)
    return parameters


def layer_norm(path: str, row: str, condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters `PATH.scale` and `PATH.bias` of a layer norm.

    The row of the bias is derived from the row of the scale.
    """
    leaf, name, dims = split_row(row)
    bias_row = f"{leaf} <- {name.removesuffix('weight')}bias: {dims}"
    return {
        f"{path}.scale": Parameter(row, condition),
        f"{path}.bias": Parameter(bias_row, condition),
    }


def rms_norm(path: str, row: str) -> Parameters:
    """Return the parameter of a norm's weight. An RMS norm has no bias."""
    return {f"{path}.scale": Parameter(row)}


def attention(
    name_pattern: str,
    out_name: str,
    kv_heads: str = "heads",
    bias: Condition | None = NEVER,
    out_bias: Condition | None = NEVER,
) -> Parameters:
    """Return the parameters of attention with one matrix each for queries, keys, values and output.

    Args:
        name_pattern: Name of the modules, with `{}` in place of q, k, v and `out_name`.
        out_name: Name of the output projection in the pattern.
        kv_heads: Atom of the key and value heads.
        bias: When queries, keys and values have a bias.
        out_bias: When the output projection has one.
    """
    row = f"embed heads head_dim <- {name_pattern.format(out_name)}.weight: embed (heads head_dim)"
    return separate_qkv(name_pattern, kv_heads, bias) | linear("attn.o", row, out_bias)


def separate_qkv(
    name_pattern: str, kv_heads: str = "heads", bias: Condition | None = NEVER
) -> Parameters:
    """Return the parameters of queries, keys and values stored apart. See `attention` for the arguments."""
    parameters: Parameters = {}
    for projection, heads in (("q", "heads"), ("k", kv_heads), ("v", kv_heads)):
        row = f"{heads} head_dim embed <- {name_pattern.format(projection)}.weight: ({heads} head_dim) embed"
        parameters |= linear(f"attn.{projection}", row, bias)
    return parameters


def fused_qkv(name: str, dims: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return the parameters of queries, keys and values stored as equal parts of one tensor.

    `dims` has `{}` in place of the number of the part.
    """
    parameters: Parameters = {}
    for number, projection in enumerate("qkv"):
        row = f"heads head_dim embed <- {name}.weight: {dims.format(number)}"
        parameters |= linear(f"attn.{projection}", row, bias)
    return parameters


def mark_part(parts: Mapping[str, str], name: str) -> str:
    """Return a dim of unequal parts with one of them marked.

    >>> mark_part({"a": "x y", "b": "z"}, "b")
    '(x y | >z)'
    """
    marked = [f">{dims}" if part == name else dims for part, dims in parts.items()]
    return f"({' | '.join(marked)})"


def grouped_qkv(module: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return queries, keys and values of one tensor: all queries, then all keys, then all values."""
    # With 4 heads and 2 kv_heads of 8 elements, rows 0 to 31 are queries, 32 to 47 keys, and 48 to 63 values.
    parts = {"q": "heads head_dim", "k": "kv_heads head_dim", "v": "kv_heads head_dim"}
    parameters: Parameters = {}
    for name, dims in parts.items():
        row = f"{dims} embed <- {module}.weight: {mark_part(parts, name)} embed"
        parameters |= linear(f"attn.{name}", row, bias)
    return parameters


def plain_mlp(
    up: str = "mlp.up_proj",
    down: str = "mlp.down_proj",
    bias: Condition | None = NEVER,
    *,
    path: str = "mlp",
    mlp: str = "mlp",
) -> Parameters:
    """Return the parameters of an MLP without a gate. `mlp` is the atom of its hidden units."""
    return {
        **linear(f"{path}.up", f"{mlp} embed <- {up}.weight: {mlp} embed", bias),
        **linear(f"{path}.down", f"embed {mlp} <- {down}.weight: embed {mlp}", bias),
    }


def stack(path: str, name: str, layer: Mapping[str, Parameter]) -> Parameters:
    """Stack the parameters of one layer over all layers.

    Args:
        path: Path of the layers in the tree.
        name: Prefix of a layer's tensors, with the layer atom in braces (`h.{layers}`). Leaves get
            its dim first.
        layer: Parameters of one layer, with paths and tensor names relative to `path` and `name`.
    """
    # Example with the name h.{layers}: `embed <- norm.weight: embed` becomes
    # `layers embed <- h.{layers}.norm.weight: embed`.
    (atom,) = re.findall(r"{(\w+)}", name)
    parameters: Parameters = {}
    for relative_path, parameter in layer.items():
        changed: dict[str, str] = {}
        for form in ROW_FORMS:
            if row := getattr(parameter, form):
                leaf, tensor, dims = split_row(row)
                changed[form] = f"{atom} {leaf} <- {name}.{tensor}: {dims}"
        parameters[f"{path}.{relative_path}"] = dataclasses.replace(parameter, **changed)
    return parameters


def split_row(row: str) -> tuple[str, str, str]:
    """Return the leaf dims, the tensor name and the tensor dims of a row, as text."""
    leaf, _, right = row.partition("<-")
    name, _, dims = right.rpartition(":")
    return leaf.strip(), name.strip(), dims.strip()


def map_rows(parameter: Parameter, change: Callable[[str], str]) -> Parameter:
    """Return a parameter with `change` applied to its axis maps: `row`, and those of the other forms."""
    changed = {name: change(text) for name in ROW_FORMS if (text := getattr(parameter, name))}
    return dataclasses.replace(parameter, **changed)


@cache
def unless_false(field: str) -> Callable[[HFConfig], bool]:
    """Return the condition of a config field to be true or absent. Equal fields have the same function.

    >>> has_bias = unless_false("use_bias")
    >>> has_bias({}), has_bias({"use_bias": False})
    (True, False)
    """
    return lambda config: bool(config.get(field, True))


def split_dims(dims: str) -> list[str]:
    """Return the text of each dim on one side of a row."""
    return re.findall(r"\([^()]*\)|[^\s()]+", dims)


def atoms_in(dims: str) -> list[str]:
    """Return the named axes (atoms) in dims of a row, including the ones in braces and in other parts."""
    # A name does not begin with a digit, so the index of `qkv=0` is not an atom.
    return re.findall(r"[^\W\d]\w*", dims)


# Named axis (atom) -> extent.
Sizes = Mapping[str, int]
# Choice of the architecture -> its value, or a function of the config and the sizes.
Choices = Mapping[str, Any]
# Config and number of its layers -> numbers of some layers.
LayerNumbers = Callable[[HFConfig, int], tuple[int, ...]]
NO_CHOICES: Choices = MappingProxyType({})


def positive(field: str, default: float) -> Callable[[HFConfig, Sizes], float]:
    """Return the reader of a config field with a positive number."""
    return lambda config, sizes: read_positive(config, field, default)


class RecordedConfig(dict[str, Any]):
    """A config that records the names of the fields that were read. A copy records only if `changed` makes it."""

    def __init__(self, config: HFConfig) -> None:
        """Record the fields of `config`."""
        super().__init__(config)
        self.fields: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Record a field, and return its value or the default."""
        self.fields.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.fields.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.fields.add(key)
        return super().__getitem__(key)


def changed(config: HFConfig, **fields: Any) -> HFConfig:
    """Return a config with other values of some fields. Reads of a recorded config are recorded in it too.

    >>> changed({"hidden_act": "gelu"}, hidden_act="silu")
    {'hidden_act': 'silu'}
    """
    copy = {**config, **fields}
    if not isinstance(config, RecordedConfig):
        return copy
    recorded = RecordedConfig(copy)
    recorded.fields = config.fields
    return recorded


def with_aliases(config: HFConfig, aliases: Mapping[str, str]) -> HFConfig:
    """Return a config in which aliases override the fields that they name, as in `attribute_map` of transformers.

    >>> with_aliases({"num_layers": 2}, {"num_layers": "num_hidden_layers"})
    {'num_layers': 2, 'num_hidden_layers': 2}
    """
    values: dict[str, JsonValue] = {}
    for alias, name in aliases.items():
        if alias in config:
            values[name] = config.get(alias)
    return changed(config, **values) if values else config


class LayerGroup(NamedTuple):
    """Parameters that some or all layers have."""

    parameters: Parameters  # Parameters of one of these layers.
    numbers: LayerNumbers  # Numbers of these layers.
    may_be_all: bool = True  # Whether they may be all layers of a model.


NO_GROUPS: Mapping[str, LayerGroup] = MappingProxyType({})


class Settings(TypedDict, total=False):
    """Facts of a family with a usual value."""

    choices: Choices  # Fields of the architecture that differ.
    # Path part and atom of a group -> parameters of some layers. They are in `layers` if all layers have them, and else
    # in a stack of the group's layers.
    groups: Mapping[str, LayerGroup]
    # Raises PrepError for a config that the readers accept although it is not supported.
    check: Callable[[HFConfig, Sizes], None]
    # Semantic fields that transformers' class does not read, or only without other fields. A config may have them.
    ignores: Iterable[str]
    tied: bool  # Whether the head is tied if the config does not say. Default: it is not.
    dropped: Mapping[str, str]  # Pattern of tensors to ignore -> their description.
    dropout_fields: DropoutFields  # Fields of the config with dropout rates.
    # Number of layers for multi-token prediction if the config does not state it.
    prediction_layers: int


def declare(
    name: str,
    title: str,
    *,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch: Callable[[HFConfig, Sizes], ArchConfig],
    parameters: Parameters,
    prefix: str,
    layers: str = "layers.{layers}",
    **settings: Unpack[Settings],
) -> Family:
    """Return a family with an output head.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        sizes: Named axis (atom) -> extent, without the sizes of groups.
        arch: The architecture, before `choices`.
        parameters: Parameters of all layers, and parameters outside of layers.
        prefix: Prefix of its tensors in a file of the model with its head.
        layers: Prefix of the tensors of a layer.
        settings: See `Settings`.
    """
    groups = settings.get("groups", NO_GROUPS)

    def numbers(config: HFConfig) -> dict[str, tuple[int, ...]]:
        return partial_groups(groups, config, sizes(config)[LAYERS]) if groups else {}

    def all_sizes(config: HFConfig) -> dict[str, int]:
        counts = {group: len(listed) for group, listed in numbers(config).items()}
        return {**sizes(config), **counts}

    grouped: Parameters = {}
    # A family supports the fields in conditions of a group even if a model has no layer of the group.
    conditional = {**parameters}
    for group, members in groups.items():
        grouped |= _group_parameters(group, members, sizes, layers)
        conditional |= stack(group, layers, members.parameters)
    if grouped:
        parameters = _insert_after_layers(parameters, grouped)
    # Tensors of the head never have the family's prefix.
    unprefixed: list[str] = []
    for path, parameter in parameters.items():
        if path.startswith("head."):
            forms = [row for row in (parameter.row, parameter.alternate) if row]
            unprefixed += [split_row(row)[1] for row in forms]
    return Family(
        name=name,
        prefix=prefix,
        unprefixed=tuple(unprefixed),
        sizes=all_sizes if groups else sizes,
        parameters=parameters,
        dropped=settings.get("dropped", {}),
        tying=WeightTying(
            head_leaf="head.weight",
            head_tensor=split_row(parameters["head.weight"].row)[1],
            embedding_tensor=split_row(parameters["embed.tokens"].row)[1],
            tied_by_default=settings.get("tied", False),
        ),
        arch_config=supporting(
            all_sizes,
            arch,
            conditional,
            settings.get("choices", NO_CHOICES),
            check=settings.get("check"),
            ignores=settings.get("ignores", ()),
        ),
        dropout_fields=settings.get("dropout_fields", ATTENTION_DROPOUT),
        layer_numbers=numbers,
        default_prediction_layers=settings.get("prediction_layers", 0),
        title=title,
    )


def supporting(
    sizes: Callable[[HFConfig], dict[str, int]],
    arch: Callable[[HFConfig, Sizes], ArchConfig],
    parameters: Parameters,
    choices: Choices = NO_CHOICES,
    *,
    check: Callable[[HFConfig, Sizes], None] | None = None,
    ignores: Iterable[str] = (),
) -> Callable[[HFConfig], ArchConfig]:
    """Return the function from a config to its architecture. It refuses a semantic field without a reader.

    The arguments are the ones of `declare` and `Settings`.
    """
    conditions = {parameter.condition for parameter in parameters.values()}

    def arch_config(config: HFConfig) -> ArchConfig:
        recorded = config if isinstance(config, RecordedConfig) else RecordedConfig(config)
        axis_sizes = sizes(recorded)
        found = arch(recorded, axis_sizes)
        values: dict[str, Any] = {}
        for field, choice in choices.items():
            values[field] = choice(recorded, axis_sizes) if callable(choice) else choice
        for condition in conditions:
            condition_holds(recorded, condition)
        if check is not None:
            check(recorded, axis_sizes)
        # A family with a rotary embedding reads one or the other form of its fields.
        rope_fields = ROPE_FIELDS if recorded.fields & {*ROPE_FIELDS} else ()
        reject_unsupported_fields(config, *rope_fields, *ignores, *recorded.fields)
        return dataclasses.replace(found, **values)

    return arch_config


def by_name(*families: Family) -> dict[str, Family]:
    """Return families by their model types."""
    return {family.name: family for family in families}


def partial_groups(
    groups: Mapping[str, LayerGroup], config: HFConfig, layers: int
) -> dict[str, tuple[int, ...]]:
    """Return the groups of some layers, but not all -> numbers of their layers."""
    found: dict[str, tuple[int, ...]] = {}
    for group, members in groups.items():
        listed = members.numbers(config, layers)
        if 0 < len(listed) < layers:
            found[group] = listed
    return found


def _group_parameters(
    group: str, members: LayerGroup, sizes: Callable[[HFConfig], dict[str, int]], layers: str
) -> Parameters:
    """Return the parameters of a group, both in `layers` and in a stack of its layers, each under its condition."""

    def has_all_layers(config: HFConfig) -> bool:
        count = sizes(config)[LAYERS]
        return len(members.numbers(config, count)) == count

    def has_some_layers(config: HFConfig) -> bool:
        count = sizes(config)[LAYERS]
        return 0 < len(members.numbers(config, count)) < count

    parameters: Parameters = {}
    if members.may_be_all:
        in_layers = under_condition(members.parameters, has_all_layers)
        parameters |= stack(LAYERS, layers, in_layers)
    grouped = under_condition(members.parameters, has_some_layers)
    return parameters | stack(group, layers.replace(LAYERS + "}", group + "}"), grouped)


def _insert_after_layers(parameters: Parameters, grouped: Parameters) -> Parameters:
    """Return parameters with the ones of groups after the ones of all layers, before the last norm."""
    in_layers = [path.startswith(f"{LAYERS}.") for path in parameters]
    end = len(in_layers) - in_layers[::-1].index(True)
    return {**dict(islice(parameters.items(), end)), **grouped, **parameters}


def under_condition(parameters: Parameters, condition: Condition) -> Parameters:
    """Return parameters that exist if their own condition and another one hold."""
    limited: Parameters = {}
    for path, parameter in parameters.items():

        def holds(config: HFConfig, inner: Parameter = parameter) -> bool:
            return condition_holds(config, condition) and condition_holds(config, inner.condition)

        limited[path] = dataclasses.replace(parameter, condition=holds)
    return limited
