"""What families are put together from: the rows of matrices, norms and attention, of one layer and of all. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from trainer.models.architecture import ArchConfig
from trainer.models.parameters import Condition, Family, HFConfig, Parameter, TreeLayout, WeightTying

Parameters = dict[str, Parameter]


def embedding(path: str, row: str) -> Parameters:
    """`row` of the vectors of tokens or positions."""
    return {f"embed.{path}": Parameter(row)}


def matrix(path: str, row: str, alternate: str = "", condition: Condition = "", else_row: str = "") -> Parameters:
    """`row` of a weight without a bias, there `when` the config says, else `otherwise` where there is such a row;
    `other`: of the form that some files have."""
    return {f"{path}.weight": Parameter(row, condition, alternate, else_row)}


def linear(path: str, row: str, bias: Condition | None = "") -> Parameters:
    """`row` of a weight, stored [out, in] or [in, out], and that of its bias, which has the outputs: the dims that the
    leaf begins with. `bias`: when it is there, None: never."""
    leaf, name, dims = split_row(row)
    out = next(dim for atom in leaf.split() for dim in split_dims(dims) if atom in _atoms_in(dim))
    kept = " ".join(atom for atom in leaf.split() if atom in _atoms_in(out) or atom not in _atoms_in(dims))
    biases = (
        {} if bias is None else {f"{path}.bias": Parameter(f"{kept} <- {_sibling_tensor(name, 'bias')}: {out}", bias)}
    )
    return {f"{path}.weight": Parameter(row), **biases}


def layer_norm(path: str, row: str, condition: Condition = "") -> Parameters:
    """`row` of a norm's weight and that of its bias, both there `when` the config says."""
    leaf, name, dims = split_row(row)
    bias = f"{leaf} <- {_sibling_tensor(name, 'bias')}: {dims}"
    return {f"{path}.scale": Parameter(row, condition), f"{path}.bias": Parameter(bias, condition)}


def rms_norm(path: str, row: str) -> Parameters:
    """`row` of a norm's weight; it has no bias."""
    return {f"{path}.scale": Parameter(row)}


def attention(
    name_pattern: str,
    out_name: str,
    kv_heads: str = "heads",
    bias: Condition | None = None,
    out_bias: Condition | None = None,
) -> Parameters:
    """Queries, keys, values and what is made of them, each a matrix of its own. `{}` in the modules' names is q, k, v,
    or `out`; `bias`: when the first three have one, None: never."""
    found = {}
    for ours, heads in (("q", "heads"), ("k", kv_heads), ("v", kv_heads)):
        row = f"{heads} head_dim embed <- {name_pattern.format(ours)}.weight: ({heads} head_dim) embed"
        found |= linear(f"attn.{ours}", row, bias)
    row = f"embed heads head_dim <- {name_pattern.format(out_name)}.weight: embed (heads head_dim)"
    return found | linear("attn.o", row, out_bias)


def fused_qkv(name: str, dims: str, bias: Condition = "") -> Parameters:
    """Queries, keys and values as one tensor of equal parts; `{}` in its dims stands for which of the three."""
    found = {}
    for number, ours in enumerate("qkv"):
        found |= linear(f"attn.{ours}", f"heads head_dim embed <- {name}.weight: {dims.format(number)}", bias)
    return found


def stack(path: str, name: str, layer: Mapping[str, Parameter]) -> Parameters:
    """The rows of one layer as those of all of them: below `path` in the tree, their tensors below `name`, whose braces
    number the layer and name the atom over which leaves are stacked, first."""
    (atom,) = re.findall(r"{(\w+)}", name)

    def inside(row: str) -> str:
        leaf, tensor, dims = split_row(row)
        return f"{atom} {leaf} <- {name}.{tensor}: {dims}"

    return {f"{path}.{below}": map_rows(parameter, inside) for below, parameter in layer.items()}


def build_family(
    name: str,
    prefix: str,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch_config: Callable[[HFConfig], ArchConfig],
    parameters: Parameters,
    tied_by_default: bool,
    dropped: Mapping[str, str],
    layouts: Mapping[str, TreeLayout] | None = None,
) -> Family:
    """A family of these rows; `tied`: whether the head is the embedding where a config does not say. Files never have
    the prefix before the head."""
    heads = (parameter for path, parameter in parameters.items() if path.startswith("head."))
    head, tokens = (split_row(parameters[path].row)[1] for path in ("head.weight", "embed.tokens"))
    return Family(
        name=name,
        prefix=prefix,
        unprefixed=tuple(split_row(row)[1] for each in heads for row in (each.row, each.alternate) if row),
        sizes=sizes,
        parameters=parameters,
        dropped=dropped,
        tying=WeightTying(
            head_leaf="head.weight", head_tensor=head, embedding_tensor=tokens, tied_by_default=tied_by_default
        ),
        arch_config=arch_config,
        layouts=layouts or {},
    )


def split_row(row: str) -> tuple[str, str, str]:
    """The text of a row's leaf, of its tensor's name, and of the tensor's dims."""
    leaf, _, right = row.partition("<-")
    name, _, dims = right.rpartition(":")
    return leaf.strip(), name.strip(), dims.strip()


def map_rows(parameter: Parameter, change: Callable[[str], str]) -> Parameter:
    """A parameter with all of its rows changed."""
    row, other, otherwise = (text and change(text) for text in (parameter.row, parameter.alternate, parameter.else_row))
    return dataclasses.replace(parameter, row=row, alternate=other, else_row=otherwise)


def unless_false(field: str) -> Callable[[HFConfig], bool]:
    """When a config sets a field or does not have it."""
    return lambda config: bool(config.get(field, True))


def split_dims(dims: str) -> list[str]:
    """The text of each dim of a side of a row."""
    return re.findall(r"\([^()]*\)|[^\s()]+", dims)


def _atoms_in(dims: str) -> list[str]:
    return re.findall(r"[^\W\d]\w*", dims)


def _sibling_tensor(weight: str, name: str) -> str:
    return weight.removesuffix("weight") + name
