"""What families are put together from: the rows of matrices, norms and attention, of one layer and of all. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from trainer.models.architecture import Traits
from trainer.models.parameters import Config, Family, Layout, Parameter, Tie, When

Rows = dict[str, Parameter]


def embedding(path: str, row: str) -> Rows:
    """`row` of the vectors of tokens or positions."""
    return {f"embed.{path}": Parameter(row)}


def matrix(path: str, row: str, other: str = "", when: When = "", otherwise: str = "") -> Rows:
    """`row` of a weight without a bias, there `when` the config says, else `otherwise` where there is such a row;
    `other`: of the form that some files have."""
    return {f"{path}.weight": Parameter(row, when, other, otherwise)}


def linear(path: str, row: str, bias: When | None = "") -> Rows:
    """`row` of a weight, stored [out, in] or [in, out], and that of its bias, which has the outputs: the dims that the
    leaf begins with. `bias`: when it is there, None: never."""
    leaf, name, dims = row_parts(row)
    out = next(dim for atom in leaf.split() for dim in split_dims(dims) if atom in _atoms(dim))
    kept = " ".join(atom for atom in leaf.split() if atom in _atoms(out) or atom not in _atoms(dims))
    biases = {} if bias is None else {f"{path}.bias": Parameter(f"{kept} <- {_other(name, 'bias')}: {out}", bias)}
    return {f"{path}.weight": Parameter(row), **biases}


def layer_norm(path: str, row: str, when: When = "") -> Rows:
    """`row` of a norm's weight and that of its bias, both there `when` the config says."""
    leaf, name, dims = row_parts(row)
    bias = f"{leaf} <- {_other(name, 'bias')}: {dims}"
    return {f"{path}.scale": Parameter(row, when), f"{path}.bias": Parameter(bias, when)}


def rms_norm(path: str, row: str) -> Rows:
    """`row` of a norm's weight; it has no bias."""
    return {f"{path}.scale": Parameter(row)}


def attention(
    names: str, out: str, kv_heads: str = "heads", bias: When | None = None, out_bias: When | None = None
) -> Rows:
    """Queries, keys, values and what is made of them, each a matrix of its own. `{}` in the modules' names is q, k, v,
    or `out`; `bias`: when the first three have one, None: never."""
    found = {}
    for ours, heads in (("q", "heads"), ("k", kv_heads), ("v", kv_heads)):
        row = f"{heads} head_dim embed <- {names.format(ours)}.weight: ({heads} head_dim) embed"
        found |= linear(f"attn.{ours}", row, bias)
    row = f"embed heads head_dim <- {names.format(out)}.weight: embed (heads head_dim)"
    return found | linear("attn.o", row, out_bias)


def fused_qkv(name: str, dims: str, bias: When = "") -> Rows:
    """Queries, keys and values as one tensor of equal parts; `{}` in its dims stands for which of the three."""
    found = {}
    for number, ours in enumerate("qkv"):
        found |= linear(f"attn.{ours}", f"heads head_dim embed <- {name}.weight: {dims.format(number)}", bias)
    return found


def stack(path: str, name: str, layer: Mapping[str, Parameter]) -> Rows:
    """The rows of one layer as those of all of them: below `path` in the tree, their tensors below `name`, whose braces
    number the layer and name the atom over which leaves are stacked, first."""
    (atom,) = re.findall(r"{(\w+)}", name)

    def inside(row: str) -> str:
        leaf, tensor, dims = row_parts(row)
        return f"{atom} {leaf} <- {name}.{tensor}: {dims}"

    return {f"{path}.{below}": with_rows(parameter, inside) for below, parameter in layer.items()}


def family(
    name: str,
    prefix: str,
    sizes: Callable[[Config], dict[str, int]],
    traits: Callable[[Config], Traits],
    table: Rows,
    tied: bool,
    dropped: Mapping[str, str],
    layouts: Mapping[str, Layout] | None = None,
) -> Family:
    """A family of these rows; `tied`: whether the head is the embedding where a config does not say. Files never have
    the prefix before the head."""
    heads = (parameter for path, parameter in table.items() if path.startswith("head."))
    head, tokens = (row_parts(table[path].row)[1] for path in ("head.weight", "embed.tokens"))
    return Family(
        name=name,
        prefix=prefix,
        unprefixed=tuple(row_parts(row)[1] for each in heads for row in (each.row, each.other) if row),
        sizes=sizes,
        table=table,
        dropped=dropped,
        tie=Tie(leaf="head.weight", tensor=head, embedding=tokens, default=tied),
        traits=traits,
        layouts=layouts or {},
    )


def row_parts(row: str) -> tuple[str, str, str]:
    """The text of a row's leaf, of its tensor's name, and of the tensor's dims."""
    leaf, _, right = row.partition("<-")
    name, _, dims = right.rpartition(":")
    return leaf.strip(), name.strip(), dims.strip()


def with_rows(parameter: Parameter, change: Callable[[str], str]) -> Parameter:
    """A parameter with all of its rows changed."""
    row, other, otherwise = (text and change(text) for text in (parameter.row, parameter.other, parameter.otherwise))
    return dataclasses.replace(parameter, row=row, other=other, otherwise=otherwise)


def unless_off(field: str) -> Callable[[Config], bool]:
    """When a config sets a field or does not have it."""
    return lambda config: bool(config.get(field, True))


def split_dims(dims: str) -> list[str]:
    """The text of each dim of a side of a row."""
    return re.findall(r"\([^()]*\)|[^\s()]+", dims)


def _atoms(dims: str) -> list[str]:
    return re.findall(r"[^\W\d]\w*", dims)


def _other(weight: str, name: str) -> str:
    return weight.removesuffix("weight") + name
