"""Parameters and families: what a model's tree is made of, and where each leaf's elements are in Hugging Face tensors.

A family is data: rows of text, a function from its config to extents, and a few names. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.models.architecture import ArchConfig
from trainer.models.axis_map import AtomDims, Row, Sizes, bind_row, parse_row
from trainer.models.errors import PrepError

HFConfig = Mapping[str, Any]
Condition = str | Callable[[HFConfig], bool]  # a field that has to be true in a config, none (""), or a question to it
LAYERS = "layers"  # in a path; and the atom that counts a decoder's
LAYER_PLACEHOLDER = f"{{{LAYERS}}}"  # of such a layer, in a name
ENCODER_LAYERS = "encoder_layers"
ENCODER, DECODER = "encoder", "decoder"  # in the paths of a model that has both
LAYER_ATOMS = (LAYERS, ENCODER_LAYERS)  # atoms each index of which is a layer; a leaf has one of them or none
MAX_AXIS_SIZE = (1 << 31) - 1  # size of an axis
MAX_LAYERS = 1 << 16
EMBEDDING_PATH_PARTS = {"embed", "relative_positions"}  # in a path: of tokens, positions, distances


def condition_holds(config: HFConfig, condition: Condition) -> bool:
    """Whether a config says so."""
    return condition(config) if callable(condition) else not condition or bool(config.get(condition))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A leaf of the tree: `row` ties it to tensors named without the base prefix; it is there `when` the config says.

    `other` ties it to tensors of another form that some files have; the row whose tensors exist is taken. `otherwise`
    is its row where the config says no; without one it is not there.
    """

    row: str
    condition: Condition = ""
    alternate: str = ""
    else_row: str = ""

    def resolve(self, config: HFConfig) -> Parameter | None:
        """The parameter as a model with this config has it."""
        if condition_holds(config, self.condition):
            return self
        return Parameter(self.else_row) if self.else_row else None


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The tree that another library keeps the same tensors in: path -> parameter, its row without a dim of the layers.

    `{layers}`, or another of STACKS, in a path is the number of a layer; in a tree with layers stacked `stacked` stands
    there (empty: it never has them stacked). `spellings`: paths that some of its trees have -> those of the table.
    """

    parameters: Mapping[str, Parameter]
    stacked_name: str = ""
    allows_tied_head: bool = False  # whether the head may be the embedding there, without a leaf of its own
    path_aliases: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()  # fields of a config that the other library computes nothing from


@dataclass(frozen=True, slots=True)
class WeightTying:
    """A head that may be the embedding: leaf and tensor of both, and what holds where the config does not say.

    `own`: whether a config that says so means it only where no head is stored. `untied`: what a config says besides,
    once a head that was the embedding is its own.
    """

    head_leaf: str
    head_tensor: str
    embedding_tensor: str  # tensor
    tied_by_default: bool
    stored_head_unties: Callable[[HFConfig], bool] = lambda config: False
    untied_fields: Callable[[HFConfig], HFConfig] = lambda config: {}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: everything that conversion and training ask of it."""

    name: str  # as config.json's model_type says
    prefix: str  # of tensors in a file that holds the model with its head
    unprefixed: tuple[str, ...]  # tensors that never have the prefix
    sizes: Callable[[HFConfig], dict[str, int]]  # atom -> extent; PrepError names a config that makes no sense
    parameters: Mapping[str, Parameter]  # path in the tree -> parameter
    dropped: Mapping[str, str]  # pattern of a tensor's name, `{i}` any number -> what it is
    tying: WeightTying
    arch_config: Callable[[HFConfig], ArchConfig]  # PrepError for a config whose mathematics prep does not have
    layouts: Mapping[str, TreeLayout] = field(default_factory=dict)  # other trees, by name
    duplicates: Mapping[str, str] = field(
        default_factory=dict
    )  # tensor that some files have -> the one that it repeats

    def is_tied(self, config: HFConfig, tensors: Collection[str] = ()) -> bool:
        """Whether a config, of a file with these tensors, says that the head is the embedding."""
        said = config.get("tie_word_embeddings")
        tied = bool(self.tying.tied_by_default if said is None else said)
        return tied and not (self.tying.head_tensor in tensors and self.tying.stored_head_unties(config))


def read_size(config: HFConfig, key: str, default: int, maximum: int = MAX_AXIS_SIZE) -> int:
    """A size that a config gives, `default` where it does not (null is not). PrepError unless it is 1 to `most`."""
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= maximum:
        why = f"{key} is {found!r:.60}, it has to be a whole number from 1 to {maximum:,}"
        raise PrepError("config.json makes no sense", why)
    return found


def parameter_rows(
    family: Family, config: HFConfig, scan: bool = True, scan_axis: int = 0, tensors: Collection[str] = ()
) -> dict[str, Row]:
    """The parameters that a config has, parsed: path in the tree -> row; of two forms the one that `tensors` have.

    Stacked over layers (on axis `scan_axis`), or not: then a path has `{layers}`, or another of STACKS, and its row
    stands for many leaves.
    PrepError where the tensors of both forms are there.
    """
    sizes = family.sizes(config)
    found = {
        path: _select_form(parameter, sizes, tensors)
        for path, parameter in active_parameters(family.parameters, config)
    }
    if not scan:
        return dict(_unstack_row(path, row) for path, row in found.items())
    return {path: _move_stack_axis(row, scan_axis) for path, row in found.items()}


def layout_rows(layout: TreeLayout, config: HFConfig, stack_axis_index: int | None = None) -> dict[str, Row]:
    """The parameters of another tree that a config has, parsed: path -> row; layers apart, or stacked on an axis."""
    found = {path: parse_row(parameter.row) for path, parameter in active_parameters(layout.parameters, config)}
    if stack_axis_index is None:
        return found
    return dict(_stack_row(path, row, stack_axis_index, layout.stacked_name) for path, row in found.items())


def active_parameters(parameters: Mapping[str, Parameter], config: HFConfig) -> Iterator[tuple[str, Parameter]]:
    """The parameters that a model with this config has, as it has them."""
    for path, parameter in parameters.items():
        if own := parameter.resolve(config):
            yield path, own


def layer_atom_in(path: str) -> str:
    """Of STACKS the one whose number a path has; empty for none."""
    return next((stack for stack in LAYER_ATOMS if f"{{{stack}}}" in path), "")


def _stack_row(path: str, row: Row, axis: int, label: str) -> tuple[str, Row]:
    stack = layer_atom_in(path)
    if not stack:
        return path, row
    leaf = ((stack,), *row.leaf_dims)
    return path.replace(f"{{{stack}}}", label), _move_stack_axis(dataclasses.replace(row, leaf_dims=leaf), axis)


def _select_form(parameter: Parameter, sizes: Sizes, tensors: Collection[str]) -> Row:
    row = parse_row(parameter.row)
    if not parameter.alternate:
        return row
    other = parse_row(parameter.alternate)
    here, there = (next(name for name, _ in bind_row(each, sizes).tensors()) for each in (row, other))
    if here in tensors and there in tensors:
        raise PrepError("a parameter is there in two forms", f"{here} and {there}", "keep one of them")
    return other if there in tensors else row


def stack_axis(dims: AtomDims) -> int | None:
    """The dim of a leaf over which layers are stacked."""
    return next((axis for axis, dim in enumerate(dims) if len(dim) == 1 and dim[0] in LAYER_ATOMS), None)


def _unstack_row(path: str, row: Row) -> tuple[str, Row]:
    axis = stack_axis(row.leaf_dims)
    if axis is None:
        return path, row
    (stack,) = row.leaf_dims[axis]
    apart = path.replace(f"{LAYERS}.", f"{LAYERS}.{{{stack}}}.", 1)
    return apart, dataclasses.replace(row, leaf_dims=(*row.leaf_dims[:axis], *row.leaf_dims[axis + 1 :]))


def _move_stack_axis(row: Row, axis: int) -> Row:
    now = stack_axis(row.leaf_dims)
    if now is None:
        return row
    dims = [*row.leaf_dims[:now], *row.leaf_dims[now + 1 :]]
    dims.insert(min(axis, len(dims)), row.leaf_dims[now])
    return dataclasses.replace(row, leaf_dims=tuple(dims))
