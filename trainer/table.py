"""Parameters and families: what a model's tree is made of, and where each leaf's elements are in Hugging Face tensors.

A family is data: rows of text, a function from its config to extents, and a few names. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.axes import Row, Sizes, bind, parse
from trainer.errors import PrepError
from trainer.traits import Traits

Config = Mapping[str, Any]
When = str | Callable[[Config], bool]  # a field that has to be true in a config, none (""), or a question to it
LAYERS = "layers"
NUMBER = f"{{{LAYERS}}}"  # in a path


@dataclass(frozen=True, slots=True)
class Parameter:
    """A leaf of the tree: `row` ties it to tensors named without the base prefix; it is there `when` the config says.

    `other` ties it to tensors of another form that some files have; the row whose tensors exist is taken.
    """

    row: str
    when: When = ""
    other: str = ""

    def present(self, config: Config) -> bool:
        """Whether a model with this config has the parameter."""
        if callable(self.when):
            return self.when(config)
        return not self.when or bool(config.get(self.when))


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree that another library keeps the same tensors in: path -> parameter, its row without a dim of the layers.

    `{layers}` in a path is the number of a layer; in a tree with layers stacked `stacked` stands there (empty: it never
    has them stacked). `spellings`: paths that some of its trees have -> those of the table.
    """

    table: Mapping[str, Parameter]
    stacked: str = ""
    ties: bool = False  # whether the head may be the embedding there, without a leaf of its own
    spellings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tie:
    """A head that may be the embedding: leaf and tensor of both, and what holds where the config does not say."""

    leaf: str
    tensor: str
    embedding: str  # tensor
    default: bool


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: everything that conversion and training ask of it."""

    name: str  # as config.json's model_type says
    prefix: str  # of tensors in a file that holds the model with its head
    unprefixed: tuple[str, ...]  # tensors that never have the prefix
    sizes: Callable[[Config], dict[str, int]]  # atom -> extent; PrepError names a config that makes no sense
    table: Mapping[str, Parameter]  # path in the tree -> parameter
    dropped: Mapping[str, str]  # pattern of a tensor's name, `{i}` any number -> what it is
    tie: Tie
    traits: Callable[[Config], Traits]  # PrepError for a config whose mathematics prep does not have
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # other trees, by name

    def tied(self, config: Config) -> bool:
        """Whether a config says that the head is the embedding."""
        return bool(config.get("tie_word_embeddings", self.tie.default))


def linear(path: str, row: str, bias: When = "") -> dict[str, Parameter]:
    """`row` of a weight [out, in] and that of its bias, which has the tensor's first dim; `bias`: when it is there."""
    leaf, name, dims = _row_parts(row)
    (first,) = re.findall(r"^\([^()]*\)|^\S+", dims)
    kept = [atom for atom in leaf.split() if atom == LAYERS or atom in re.findall(r"\w+", first)]
    bias_row = f"{' '.join(kept)} <- {name.removesuffix('weight')}bias: {first}"
    return {f"{path}.weight": Parameter(row), f"{path}.bias": Parameter(bias_row, bias)}


def layer_norm(path: str, row: str, when: When = "") -> dict[str, Parameter]:
    """`row` of a norm's weight and that of its bias, both there `when` the config says."""
    leaf, name, dims = _row_parts(row)
    bias_row = f"{leaf} <- {name.removesuffix('weight')}bias: {dims}"
    return {f"{path}.scale": Parameter(row, when), f"{path}.bias": Parameter(bias_row, when)}


def _row_parts(row: str) -> tuple[str, str, str]:
    leaf, _, right = row.partition("<-")
    name, _, dims = right.rpartition(":")
    return leaf.strip(), name.strip(), dims.strip()


def size(config: Config, key: str, default: int) -> int:
    """A size that a config gives, `default` where it does not (null is not). PrepError unless it is at least 1."""
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise PrepError("config.json makes no sense", f"{key} is {found!r}, it has to be a whole number from 1 on")
    return found


def rows(
    family: Family, config: Config, scan: bool = True, scan_axis: int = 0, tensors: Collection[str] = ()
) -> dict[str, Row]:
    """The parameters that a config has, parsed: path in the tree -> row; of two forms the one that `tensors` have.

    Stacked over layers (on axis `scan_axis`), or not: then a path has `{layers}` and its row stands for many leaves.
    PrepError where the tensors of both forms are there.
    """
    sizes = family.sizes(config)
    found = {path: _form(p, sizes, tensors) for path, p in family.table.items() if p.present(config)}
    if not scan:
        return dict(_unstacked(path, row) for path, row in found.items())
    return {path: _on_axis(row, scan_axis) for path, row in found.items()}


def layout_rows(layout: Layout, config: Config, stacked_on: int | None = None) -> dict[str, Row]:
    """The parameters of another tree that a config has, parsed: path -> row; layers apart, or stacked on an axis."""
    found = {path: parse(p.row) for path, p in layout.table.items() if p.present(config)}
    if stacked_on is None:
        return found
    return {
        path.replace(NUMBER, layout.stacked): _stacked(row, stacked_on, NUMBER in path) for path, row in found.items()
    }


def _stacked(row: Row, axis: int, is_layer: bool) -> Row:
    leaf = ((LAYERS,), *row.leaf) if is_layer else row.leaf
    return _on_axis(dataclasses.replace(row, leaf=leaf), axis)


def _form(parameter: Parameter, sizes: Sizes, tensors: Collection[str]) -> Row:
    row = parse(parameter.row)
    if not parameter.other:
        return row
    other = parse(parameter.other)
    here, there = (next(name for name, _ in bind(each, sizes).tensors()) for each in (row, other))
    if here in tensors and there in tensors:
        raise PrepError("a parameter is there in two forms", f"{here} and {there}", "keep one of them")
    return other if there in tensors else row


def _unstacked(path: str, row: Row) -> tuple[str, Row]:
    if (LAYERS,) not in row.leaf:
        return path, row
    numbered = path.replace(f"{LAYERS}.", f"{LAYERS}.{{{LAYERS}}}.", 1)
    return numbered, dataclasses.replace(row, leaf=tuple(dim for dim in row.leaf if dim != (LAYERS,)))


def _on_axis(row: Row, axis: int) -> Row:
    if (LAYERS,) not in row.leaf:
        return row
    others = [dim for dim in row.leaf if dim != (LAYERS,)]
    others.insert(min(axis, len(others)), (LAYERS,))
    return dataclasses.replace(row, leaf=tuple(others))
