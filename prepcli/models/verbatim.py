"""The verbatim family: the tensors of one checkpoint under their own names. It converts and cannot be trained.

A leaf is one tensor, or a stack of the tensors of equal dtype and shape with names that differ in numbers only:

    model.layers.0.mlp.weight [8, 4]
    model.layers.1.mlp.weight [8, 4]    ->    model.layers.*.mlp.weight [2, 8, 4]

A number is a part of a dotted name. The first one of a name counts layers, and one of the others counts experts. The
numbers need not be consecutive: the attention of every fourth layer is one leaf. Tensors of one pattern form several
leaves if their dtypes or shapes differ, or if layers have unequal numbers of experts. No I/O, no jax.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from prepcli.algebra.axis_map import (
    LAYERS,
    NamePattern,
    ParsedAxisMap,
    SourceDim,
    Term,
    escape_path,
)
from prepcli.core.errors import GET_AGAIN_HINT, Command, PrepError, text
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import (
    VERBATIM,
    Family,
    HFConfig,
    Parameter,
    WeightTying,
    parameter_rows,
)
from prepcli.models.rules import VERBATIM_EXPERTS

CANNOT_TRAIN = "names kept as in the file; prep cannot train this architecture"
# Replaces the numbers of stacked tensors in the path of their leaf, e.g. `layers.*.w`.
STACKED_NUMBER = "*"
# TensorStore opens an array at `a/` as the array at `a`. No path of a leaf may end with it.
DIRECTORY_END = "/"
# A number that is a whole part of a dotted name, e.g. `12` in `layers.12.w`. `007` does not match, because its zeros
# would be lost. Numbers of more than 9 digits do not match, because no layer or expert has such a number.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")

# Name -> dtype and shape.
TensorTypes = Mapping[str, tuple[str, tuple[int, ...]]]
# The numbers that occur at each position of a name, e.g. ((0, 1), (0, 2)). See `_Stack`.
Product = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Tensors of one leaf: a name without its numbers, and the numbers of each position.

    The tensors are all combinations of the numbers, e.g. pieces (`l.`, `.e.`, `.w`) and numbers ((0, 1), (0, 2)) are
    l.0.e.0.w, l.0.e.2.w, l.1.e.0.w and l.1.e.2.w.
    """

    pieces: tuple[str, ...]
    numbers: Product
    shape: tuple[int, ...]

    def atom(self, position: int) -> str:
        """Return the name of the axis that stacks the numbers of a position, or "" for a single number."""
        if len(self.numbers[position]) == 1:
            return ""
        return LAYERS if position == 0 else VERBATIM_EXPERTS

    @property
    def is_stacked(self) -> bool:
        """Whether the leaf has a stacked dim."""
        return any(map(self.atom, range(len(self.numbers))))

    def path(self, layer: str = STACKED_NUMBER) -> str:
        """Return the leaf's path as a template: `layer` in place of the stacked layer numbers."""
        path = escape_path(self.pieces[0])
        for position, piece in enumerate(self.pieces[1:]):
            number = str(self.numbers[position][0])
            if atom := self.atom(position):
                number = layer if atom == LAYERS else STACKED_NUMBER
            path += number + escape_path(piece)
        return path

    def row(self) -> ParsedAxisMap:
        """Return the axis map: the stacked numbers are the first dims of the leaf."""
        name_parts: list[str | NamePattern] = []
        stacked_dims: list[tuple[str, ...]] = []
        literal = self.pieces[0]
        for position, piece in enumerate(self.pieces[1:]):
            numbers = self.numbers[position]
            if atom := self.atom(position):
                if literal:
                    name_parts.append(literal)
                name_parts.append(NamePattern((Term(atom),), numbers=numbers))
                stacked_dims.append((atom,))
                literal = piece
            else:
                literal += f"{numbers[0]}{piece}"
        if literal or not name_parts:
            name_parts.append(literal)
        atoms = dim_atoms(self.shape)
        return ParsedAxisMap(
            text=self.path(),
            leaf_dims=(*stacked_dims, *((atom,) for atom in atoms)),
            name_parts=tuple(name_parts),
            source_dims=tuple(SourceDim(((Term(atom),),)) for atom in atoms),
        )


def verbatim_family(tensors: TensorTypes) -> Family:
    """Return a family made for one checkpoint: its parameters have the names of the checkpoint's tensors.

    The architecture of the model need not be supported. Tensors with equal names but for their numbers, and with
    equal shapes, become one stacked leaf. E.g. `h.0.w` and `h.1.w` become `h.*.w`.

    The leaves do not depend on the order of the tensors. A tensor without elements has no leaf.
    """
    sizes: dict[str, int] = {}
    parameters: dict[str, Parameter] = {}
    stacked_paths = {escape_path(name) for name in tensors}
    layer_paths = {*tensors}
    for stack in _stacks(tensors):
        path = stack.path()
        if stack.is_stacked or path.endswith(DIRECTORY_END):
            path = _unused_path(path, stacked_paths)
        parameters[path] = Parameter(
            "", parsed_row=stack.row(), layer_path=_layer_path(stack, layer_paths)
        )
        sizes |= zip(dim_atoms(stack.shape), stack.shape)
    return Family(
        name=VERBATIM,
        prefix="",
        unprefixed=(),
        sizes=lambda config: sizes,
        parameters=parameters,
        dropped={},
        tying=WeightTying("", "", "", tied_by_default=False),
        arch_config=_refuse_architecture,
    )


def recorded_family(manifest: Mapping[str, Any]) -> Family:
    """Return the verbatim family of the tensors that a manifest records.

    Raises:
        PrepError: The manifest has no dtype and shape of a tensor.
    """
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, record in manifest["tensors"].items():
        dtype = record.get("dtype")
        shape = record.get("shape")
        if not isinstance(dtype, str) or not _is_shape(shape):
            raise PrepError(
                "the manifest is invalid", f"{name!r:.60} has no dtype and shape", GET_AGAIN_HINT
            )
        types[name] = (dtype, tuple(shape))
    return verbatim_family(types)


def stacked_numbers(family: Family, scan: bool = True) -> dict[str, list[list[int]]]:
    """Return the layer or expert numbers of the tensors in each stacked leaf, one list per `*` in its path.

    >>> stacked_numbers(verbatim_family({"h.0.w": ("int8", (2,)), "h.4.w": ("int8", (2,))}))
    {'h.*.w': [[0, 4]]}
    """
    numbers: dict[str, list[list[int]]] = {}
    for path, row in parameter_rows(family, {}, scan).items():
        stacked_atoms = {*itertools.chain.from_iterable(row.leaf_dims)}
        for part in row.name_parts:
            if isinstance(part, NamePattern) and part.terms[0].atom in stacked_atoms:
                numbers.setdefault(path.format(), []).append(list(part.numbers))
    return numbers


def split_numbers(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the text between the numbers of a name, and the numbers.

    >>> split_numbers("h.3.mlp.0.w")
    (('h.', '.mlp.', '.w'), (3, 0))
    """
    return tuple(_NUMBER.split(name)), tuple(map(int, _NUMBER.findall(name)))


def _stacks(tensors: TensorTypes) -> Iterator[_Stack]:
    """Yield the leaves of the tensors, ordered by name."""
    groups: dict[tuple[tuple[str, ...], str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        if math.prod(shape) == 0:
            continue
        pieces, numbers = split_numbers(name)
        groups.setdefault((pieces, dtype, shape), set()).add(numbers)
    for (pieces, _, shape), indices in groups.items():
        for product in _split_into_products(indices):
            for numbers in _with_two_runs(product):
                yield _Stack(pieces, numbers, shape)


def _split_into_products(indices: Collection[tuple[int, ...]]) -> list[Product]:
    """Split a set of indices into products of numbers, e.g. {(0, 0), (0, 1), (1, 0), (1, 1)} into ((0, 1), (0, 1)).

    Layers with the same experts are in the same product. For example, layers 0 to 3 with 8 experts each and layers 4
    and 5 with 16 experts each are two products.
    """
    if indices == {()}:
        return [()]
    following: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in indices:
        following.setdefault(first, set()).add(tuple(rest))
    first_numbers: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted(following):
        first_numbers.setdefault(frozenset(following[first]), []).append(first)
    products: list[Product] = []
    for rest, numbers in first_numbers.items():
        products += [(tuple(numbers), *product) for product in _split_into_products(rest)]
    return products


def _with_two_runs(product: Product) -> Iterator[Product]:
    """Split a product until at most one position after the first has several numbers.

    >>> list(_with_two_runs(((0, 1), (0, 1), (5, 6))))
    [((0, 1), (0, 1), (5,)), ((0, 1), (0, 1), (6,))]
    """
    runs = [position for position, numbers in enumerate(product) if position and len(numbers) > 1]
    if len(runs) < 2:
        yield product
        return
    last = runs[-1]
    for number in product[last]:
        yield from _with_two_runs((*product[:last], (number,), *product[last + 1 :]))


def _layer_path(stack: _Stack, used_paths: set[str]) -> str:
    """Return the path of a stack's leaves, with `{}` for the layer.

    Paths of experts, and paths that cannot be the name of a tensor, are made unique with a suffix and added to
    `used_paths`.
    """
    template = stack.path("{}")
    atoms = {*map(stack.atom, range(len(stack.numbers)))}
    if VERBATIM_EXPERTS not in atoms and not template.endswith(DIRECTORY_END):
        # The path of each layer is the name of its tensor.
        return template
    numbers = stack.numbers[0] if stack.numbers else (0,)
    suffix = ""
    while True:
        paths = [f"{template}{suffix}".format(number) for number in numbers]
        if not any(path in used_paths or path.endswith(DIRECTORY_END) for path in paths):
            used_paths.update(paths)
            return f"{template}{suffix}"
        suffix = _next_suffix(suffix)


def _unused_path(path: str, used_paths: set[str]) -> str:
    """Return a valid path with a suffix if it is used, and add it to the used paths: `a.*.w`, `a.*.w~2`, `a.*.w~3`."""
    suffix = ""
    while f"{path}{suffix}" in used_paths or f"{path}{suffix}".endswith(DIRECTORY_END):
        suffix = _next_suffix(suffix)
    used_paths.add(f"{path}{suffix}")
    return f"{path}{suffix}"


def _next_suffix(suffix: str) -> str:
    return f"~{int(suffix[1:] or 1) + 1}"


@cache
def dim_atoms(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return a name for each dim: its extent, e.g. (8, 8, 4) -> (`d8`, `d8_2`, `d4`)."""
    atoms: list[str] = []
    for position, extent in enumerate(shape):
        repeats = shape[:position].count(extent)
        atoms.append(f"d{extent}_{repeats + 1}" if repeats else f"d{extent}")
    return tuple(atoms)


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list | tuple):
        return False
    return all(type(extent) is int and extent >= 0 for extent in shape)


def _refuse_architecture(config: HFConfig) -> ArchConfig:
    """Raise the error of every command that computes with the model."""
    name = config.get("model_type")
    if name is None:
        raise PrepError(
            "the architecture of the model is unknown",
            CANNOT_TRAIN,
            text("pass a config.json of a supported family"),
        )
    hint = text("{} explains how to add a family", Command("docs", "add-a-family"))
    raise PrepError(f"model_type `{name}` is not supported", CANNOT_TRAIN, hint)
