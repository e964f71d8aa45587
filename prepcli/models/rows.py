"""Builders of family tables: the axis-map rows of embeddings, matrices, norms, attention and stacked layers.

A row ties a leaf of the parameter tree to source tensors. `axis_map` defines the notation. No I/O,
no jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from prepcli.models.architecture import ArchConfig
from prepcli.models.dropout_config import ATTENTION_DROPOUT, DropoutFields
from prepcli.models.parameters import (
    ALWAYS,
    NEVER,
    Condition,
    Family,
    HFConfig,
    Parameter,
    WeightTying,
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

    Args:
        path: Path of the norm in the tree.
        row: Axis map of the scale. The axis map of the bias is derived from it.
        condition: Condition on the config: the parameters exist only if it is true.
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

    Args:
        name: Name of the module.
        dims: Dims of its weight, with `{}` in place of the number of the part.
        bias: When the module has a bias.
    """
    parameters: Parameters = {}
    for number, projection in enumerate("qkv"):
        row = f"heads head_dim embed <- {name}.weight: {dims.format(number)}"
        parameters |= linear(f"attn.{projection}", row, bias)
    return parameters


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


def build_family(
    name: str,
    prefix: str,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch_config: Callable[[HFConfig], ArchConfig],
    parameters: Parameters,
    tied_by_default: bool,
    dropped: Mapping[str, str],
    dropout_fields: DropoutFields = ATTENTION_DROPOUT,
    layer_numbers: Callable[[HFConfig], Mapping[str, Sequence[int]]] = lambda config: {},
    default_prediction_layers: int = 0,
    title: str = "",
) -> Family:
    """Return a family with an output head.

    The parameters must contain `head.weight`. The tensors of the head never have the family's prefix.
    The arguments are the attributes of `Family` and `WeightTying`.
    """
    unprefixed: list[str] = []
    for path, parameter in parameters.items():
        if path.startswith("head."):
            rows = [row for row in (parameter.row, parameter.alternate) if row]
            unprefixed += [split_row(row)[1] for row in rows]
    return Family(
        name=name,
        prefix=prefix,
        unprefixed=tuple(unprefixed),
        sizes=sizes,
        parameters=parameters,
        dropped=dropped,
        tying=WeightTying(
            head_leaf="head.weight",
            head_tensor=split_row(parameters["head.weight"].row)[1],
            embedding_tensor=split_row(parameters["embed.tokens"].row)[1],
            tied_by_default=tied_by_default,
        ),
        arch_config=arch_config,
        dropout_fields=dropout_fields,
        layer_numbers=layer_numbers,
        default_prediction_layers=default_prediction_layers,
        title=title,
    )


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
