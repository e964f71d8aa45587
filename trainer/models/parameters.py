"""Parameters and families: what a model's tree is made of, and where each leaf's elements are in Hugging Face tensors.

A family is data: rows of text, a function from its config to extents, and a few names. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.models.architecture import Traits
from trainer.models.axis_map import Dims, Row, Sizes, bind, parse
from trainer.models.errors import PrepError

Config = Mapping[str, Any]
When = str | Callable[[Config], bool]  # a field that has to be true in a config, none (""), or a question to it
LAYERS = "layers"  # in a path; and the atom that counts a decoder's
NUMBER = f"{{{LAYERS}}}"  # of such a layer, in a name
ENCODER_LAYERS = "encoder_layers"
ENCODER, DECODER = "encoder", "decoder"  # in the paths of a model that has both
STACKS = (LAYERS, ENCODER_LAYERS)  # atoms each index of which is a layer; a leaf has one of them or none
LARGEST = (1 << 31) - 1  # size of an axis
MOST_LAYERS = 1 << 16
EMBEDDINGS = {"embed", "relative_positions"}  # in a path: of tokens, positions, distances


def says(config: Config, when: When) -> bool:
    """Whether a config says so."""
    return when(config) if callable(when) else not when or bool(config.get(when))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A leaf of the tree: `row` ties it to tensors named without the base prefix; it is there `when` the config says.

    `other` ties it to tensors of another form that some files have; the row whose tensors exist is taken. `otherwise`
    is its row where the config says no; without one it is not there.
    """

    row: str
    when: When = ""
    other: str = ""
    otherwise: str = ""

    def of(self, config: Config) -> Parameter | None:
        """The parameter as a model with this config has it."""
        if says(config, self.when):
            return self
        return Parameter(self.otherwise) if self.otherwise else None


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree that another library keeps the same tensors in: path -> parameter, its row without a dim of the layers.

    `{layers}`, or another of STACKS, in a path is the number of a layer; in a tree with layers stacked `stacked` stands
    there (empty: it never has them stacked). `spellings`: paths that some of its trees have -> those of the table.
    """

    table: Mapping[str, Parameter]
    stacked: str = ""
    ties: bool = False  # whether the head may be the embedding there, without a leaf of its own
    spellings: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # fields of a config that the other library computes nothing from


@dataclass(frozen=True, slots=True)
class Tie:
    """A head that may be the embedding: leaf and tensor of both, and what holds where the config does not say.

    `own`: whether a config that says so means it only where no head is stored. `untied`: what a config says besides,
    once a head that was the embedding is its own.
    """

    leaf: str
    tensor: str
    embedding: str  # tensor
    default: bool
    own: Callable[[Config], bool] = lambda config: False
    untied: Callable[[Config], Config] = lambda config: {}


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
    copies: Mapping[str, str] = field(default_factory=dict)  # tensor that some files have -> the one that it repeats

    def tied(self, config: Config, tensors: Collection[str] = ()) -> bool:
        """Whether a config, of a file with these tensors, says that the head is the embedding."""
        said = config.get("tie_word_embeddings")
        tied = bool(self.tie.default if said is None else said)
        return tied and not (self.tie.tensor in tensors and self.tie.own(config))


def size(config: Config, key: str, default: int, most: int = LARGEST) -> int:
    """A size that a config gives, `default` where it does not (null is not). PrepError unless it is 1 to `most`."""
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        why = f"{key} is {found!r:.60}, it has to be a whole number from 1 to {most:,}"
        raise PrepError("config.json makes no sense", why)
    return found


def rows(
    family: Family, config: Config, scan: bool = True, scan_axis: int = 0, tensors: Collection[str] = ()
) -> dict[str, Row]:
    """The parameters that a config has, parsed: path in the tree -> row; of two forms the one that `tensors` have.

    Stacked over layers (on axis `scan_axis`), or not: then a path has `{layers}`, or another of STACKS, and its row
    stands for many leaves.
    PrepError where the tensors of both forms are there.
    """
    sizes = family.sizes(config)
    found = {path: _form(parameter, sizes, tensors) for path, parameter in present(family.table, config)}
    if not scan:
        return dict(_unstacked(path, row) for path, row in found.items())
    return {path: _on_axis(row, scan_axis) for path, row in found.items()}


def layout_rows(layout: Layout, config: Config, stacked_on: int | None = None) -> dict[str, Row]:
    """The parameters of another tree that a config has, parsed: path -> row; layers apart, or stacked on an axis."""
    found = {path: parse(parameter.row) for path, parameter in present(layout.table, config)}
    if stacked_on is None:
        return found
    return dict(_stacked(path, row, stacked_on, layout.stacked) for path, row in found.items())


def present(table: Mapping[str, Parameter], config: Config) -> Iterator[tuple[str, Parameter]]:
    """The parameters that a model with this config has, as it has them."""
    for path, parameter in table.items():
        if own := parameter.of(config):
            yield path, own


def numbered(path: str) -> str:
    """Of STACKS the one whose number a path has; empty for none."""
    return next((stack for stack in STACKS if f"{{{stack}}}" in path), "")


def _stacked(path: str, row: Row, axis: int, label: str) -> tuple[str, Row]:
    stack = numbered(path)
    if not stack:
        return path, row
    leaf = ((stack,), *row.leaf)
    return path.replace(f"{{{stack}}}", label), _on_axis(dataclasses.replace(row, leaf=leaf), axis)


def _form(parameter: Parameter, sizes: Sizes, tensors: Collection[str]) -> Row:
    row = parse(parameter.row)
    if not parameter.other:
        return row
    other = parse(parameter.other)
    here, there = (next(name for name, _ in bind(each, sizes).tensors()) for each in (row, other))
    if here in tensors and there in tensors:
        raise PrepError("a parameter is there in two forms", f"{here} and {there}", "keep one of them")
    return other if there in tensors else row


def stack_axis(dims: Dims) -> int | None:
    """The dim of a leaf over which layers are stacked."""
    return next((axis for axis, dim in enumerate(dims) if len(dim) == 1 and dim[0] in STACKS), None)


def _unstacked(path: str, row: Row) -> tuple[str, Row]:
    axis = stack_axis(row.leaf)
    if axis is None:
        return path, row
    (stack,) = row.leaf[axis]
    apart = path.replace(f"{LAYERS}.", f"{LAYERS}.{{{stack}}}.", 1)
    return apart, dataclasses.replace(row, leaf=(*row.leaf[:axis], *row.leaf[axis + 1 :]))


def _on_axis(row: Row, axis: int) -> Row:
    now = stack_axis(row.leaf)
    if now is None:
        return row
    dims = [*row.leaf[:now], *row.leaf[now + 1 :]]
    dims.insert(min(axis, len(dims)), row.leaf[now])
    return dataclasses.replace(row, leaf=tuple(dims))
