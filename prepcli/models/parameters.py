"""Parameters and families: the parameter tree of a model and its leaves in Hugging Face tensors.

A family is data: rows of text, functions from a Hugging Face config to axis sizes and to an
`ArchConfig`, and a few names. No I/O, no jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prepcli.algebra.axis_map import (
    LAYER_ATOMS,
    LAYERS,
    NamePattern,
    ParsedAxisMap,
    Sizes,
    bind_row,
    escape_path,
    number_tensors,
    stack_axis,
)
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError, invalid_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import ATTENTION_DROPOUT, DropoutFields

# When a parameter exists: the name of a config field that must be true, ALWAYS, or a function of
# the config.
Condition = str | Callable[[HFConfig], bool]
ALWAYS: Condition = ""
# Stands in place of a condition if the parameter does not exist.
NEVER = None
# First part of the paths in a model with both an encoder and a decoder.
ENCODER = "encoder"
DECODER = "decoder"
# Name of the family of checkpoints with unknown architectures. See `prepcli.models.verbatim`.
VERBATIM = "verbatim"
MAX_AXIS_SIZE = (1 << 31) - 1
# Name of a stored tensor, without prefix -> its shape.
StoredShapes = Mapping[str, Sequence[int]]
MAX_LAYERS = 1 << 16
# Path parts of token, position and relative position embeddings.
EMBEDDING_PATH_PARTS = {
    "embed",
    "relative_positions",
}


def condition_holds(config: HFConfig, condition: Condition) -> bool:
    """Return whether a config fulfils a condition."""
    if callable(condition):
        return condition(config)
    return not condition or bool(config.get(condition))


def if_set(config_field: str) -> Condition:
    """Return the condition of a true config field."""
    return config_field


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the tree and the axis-map rows to its tensors."""

    row: str  # The parameter's axis map. Tensor names are without the family's prefix.
    condition: Condition = ALWAYS  # When the parameter exists with this row.
    # Row for files with the tensors in another form, or "". The row whose tensors exist is used.
    alternate: str = ""
    # Row if the condition does not hold. If it is "", the parameter then does not exist.
    else_row: str = ""
    # Row for files with the tensors of `alternate` transposed, or "". The shapes of the tensors decide between the two.
    transposed: str = ""
    # Axis map of a verbatim tensor, or of a stack of them, in place of `row`. It lists the numbers of its layers.
    parsed_row: ParsedAxisMap | None = None
    # Path of the leaf of a single layer, with a placeholder for the layer number. Only with `parsed_row`.
    layer_path: str = ""

    def resolve(self, config: HFConfig) -> Parameter | None:
        """Return the parameter of a model with this config, or None if the model does not have it."""
        if condition_holds(config, self.condition):
            return self
        if self.else_row:
            return Parameter(self.else_row)
        return None


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The parameter tree of another library for the same tensors."""

    # Path -> parameter. A path holds the placeholder of a layer atom, such as `{layers}`. Its row has no dim of the
    # layers.
    parameters: Mapping[str, Parameter]
    # Path part in place of the part with the placeholder in trees with stacked layers, or "" if there are none.
    stacked_name: str = ""
    # Axis of the stacked layers in trees of prep, or None if it writes one leaf per layer.
    stack_axis: int | None = None
    allows_tied_head: bool = False  # Whether a tree with a tied head has no leaf for it.
    # Path in some trees -> path in `parameters`. Both may hold the placeholder of a layer atom.
    path_aliases: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()  # Config fields without effect in that library.
    non_parameters: tuple[str, ...] = ()  # Ends of the paths of leaves other than parameters.
    # First keys of other entries, in trees with the parameters at the top.
    state_keys: tuple[str, ...] = ()
    # Whether the paths of a base model, saved without its head, lack the family's prefix.
    follows_prefix: bool = False
    # Named axis (atom) or index list of some layers -> the numbers of these layers.
    layer_numbers: Callable[[HFConfig], Mapping[str, Sequence[int]]] = lambda config: {}
    # Path -> dims of a leaf without a tensor. It has zeros in float32.
    zero_leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def resolve_alias(self, path: str) -> str:
        """Return the path of a leaf in the spelling of `parameters`.

        Example:
            >>> layout = TreeLayout({}, path_aliases={"h.{layers}.wq": "h.{layers}.attn.wq"})
            >>> layout.resolve_alias("h.3.wq")
            'h.3.attn.wq'
        """
        number = re.search(r"\b[0-9]+\b", path)
        template = path
        if number:
            template = f"{path[: number.start()]}{{{LAYERS}}}{path[number.end() :]}"
        if template not in self.path_aliases:
            return path
        return self.path_aliases[template].format(**{LAYERS: number and number[0]})

    @property
    def readable_axes(self) -> tuple[int | None, ...]:
        """Axes of stacked layers in trees of this layout, the usual one first. None is one leaf per layer."""
        if not self.stacked_name:
            return (None,)
        if self.stack_axis is None:
            return None, 0, 1
        return self.stack_axis, 1 - self.stack_axis


@dataclass(frozen=True, slots=True)
class WeightTying:
    """The output head and the token embedding that may replace it."""

    head_leaf: str  # Path of the head in the tree.
    head_tensor: str  # Tensor of the head.
    embedding_tensor: str  # Tensor of the token embedding.
    tied_by_default: bool  # Whether the head is tied if the config has no `tie_word_embeddings`.
    # Whether, under this config, a stored head tensor overrides `tie_word_embeddings`.
    stored_head_unties: Callable[[HFConfig], bool] = lambda config: False
    # Config fields to set when a tied head becomes a separate parameter.
    untied_fields: Callable[[HFConfig], HFConfig] = lambda config: {}


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: its parameters and its architecture, as functions of a Hugging Face config."""

    name: str  # `model_type` of its config.json, or VERBATIM.
    prefix: str  # Prefix of tensor names in a file of the model with its head.
    unprefixed: tuple[str, ...]  # Tensors without the prefix.
    # Named axis (atom) -> extent. Raises PrepError for an invalid config.
    sizes: Callable[[HFConfig], dict[str, int]]
    parameters: Mapping[str, Parameter]  # Path in the tree -> parameter.
    # Pattern of tensors to ignore, where `{i}` matches any number and `*` any text -> their description.
    dropped: Mapping[str, str]
    tying: WeightTying  # The head and the embedding.
    # The architecture. Raises PrepError for a config that prep does not support.
    arch_config: Callable[[HFConfig], ArchConfig]
    # Trees of other libraries, by name. See `prepcli.models.registry`.
    layouts: Mapping[str, TreeLayout] = field(default_factory=dict)
    # Tensor of some files -> the tensor with the same content.
    duplicates: Mapping[str, str] = field(default_factory=dict)
    dropout_fields: DropoutFields = ATTENTION_DROPOUT  # Fields of the config with dropout rates.
    # Prefix of the tensors in `unprefixed`. Only the text part of a multimodal checkpoint has one, e.g.
    # `language_model.` of `language_model.lm_head.weight`.
    head_prefix: str = ""
    # Named axis (atom) of some layers -> the numbers of these layers.
    layer_numbers: Callable[[HFConfig], Mapping[str, Sequence[int]]] = lambda config: {}
    # Number of layers for multi-token prediction if the config does not state it. See `prepcli.models.truncation`.
    default_prediction_layers: int = 0
    title: str = ""  # One line about the family, for lists.

    @property
    def is_verbatim(self) -> bool:
        """Whether the parameters are the tensors of one checkpoint under their own names."""
        return self.name == VERBATIM

    def is_tied(self, config: HFConfig, tensors: Collection[str] = ()) -> bool:
        """Return whether the head is the token embedding, for a config and the tensors of its file."""
        # Without a known head, every tensor is a parameter of its own.
        if self.is_verbatim:
            return False
        tie_word_embeddings = config.get("tie_word_embeddings")
        tied = bool(
            self.tying.tied_by_default if tie_word_embeddings is None else tie_word_embeddings
        )
        return tied and not (
            self.tying.head_tensor in tensors and self.tying.stored_head_unties(config)
        )


# Family -> its trees of a library or of several ones, by the names of their layouts.
MakeTrees = Callable[[Family], Mapping[str, TreeLayout]]


def dropped_patterns(family: Family) -> dict[str, str]:
    """Return the regular expressions of ignored tensors -> their description."""
    patterns: dict[str, str] = {}
    for template, description in family.dropped.items():
        # `{i}` is the number of a layer, and `*` any text.
        pattern = re.escape(template).replace(r"\{i\}", r"\d+").replace(r"\*", ".*")
        patterns[pattern] = description
    return patterns


def read_size(config: HFConfig, key: str, default: int, maximum: int = MAX_AXIS_SIZE) -> int:
    """Return the size in a config field, or the default if the field is absent or null.

    Raises:
        PrepError: The value is not an integer from 1 to `maximum`.
    """
    value = config.get(key)
    if value is None:
        return default
    # `bool` is a subclass of `int`: without its check, `true` in a config would be the size 1.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        why = f"{key} is {value!r:.60}, it must be an integer from 1 to {maximum:,}"
        raise invalid_config_error(why)
    return value


def true_vocab_size(family: Family, config: HFConfig) -> int:
    """Return the vocabulary size of a config without padding.

    Raises:
        PrepError: The config has an invalid size.
    """
    padded_size = family.sizes(config)["vocab"]
    true_size = config.get("true_vocab_size", padded_size)
    if not isinstance(true_size, int) or not 1 <= true_size <= padded_size:
        why = f"true_vocab_size is {true_size!r:.60}, not an integer from 1 to vocab_size {padded_size}"
        raise invalid_config_error(why)
    return true_size


def read_count(config: HFConfig, key: str, default: int, maximum: int = MAX_AXIS_SIZE) -> int:
    """Return the number in a config field, or the default if the field is absent.

    Raises:
        PrepError: The value is not an integer from 0 to `maximum`, e.g. null.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        why = f"{key} is {value!r:.60}, it must be an integer from 0 to {maximum:,}"
        raise invalid_config_error(why)
    return value


def parameter_rows(
    family: Family,
    config: HFConfig,
    scan: bool = True,
    scan_axis: int = 0,
    tensors: StoredShapes = MappingProxyType({}),
) -> dict[str, ParsedAxisMap]:
    """Return the parsed axis-map row of each parameter of a model.

    Args:
        family: Family of the model.
        config: Content of its config.json.
        scan: Whether each leaf stacks all layers. Otherwise the paths hold the placeholder of a
            layer atom, such as `{layers}`, and such a row describes one leaf per layer.
        scan_axis: Axis of the stacked layers.
        tensors: Shapes of the stored tensors. They decide between the forms of a parameter.

    Returns:
        Path in the tree -> row.

    Raises:
        PrepError: The config is invalid, or the tensors of a row and of its alternate both exist.
    """
    sizes = family.sizes(config)
    numbers = family.layer_numbers(config)
    selected = _select_forms(family.parameters, config, sizes, numbers, tensors)
    rows: dict[str, ParsedAxisMap] = {}
    for path, parameter, row in selected:
        if scan:
            rows[path] = _move_stack_axis(row, scan_axis)
        elif parameter.parsed_row is not None:
            rows |= _rows_of_layers(path, row, parameter.layer_path)
        else:
            layer_path, layer_row = _unstack_row(path, row)
            rows[layer_path] = layer_row
    return rows


def _rows_of_layers(path: str, row: ParsedAxisMap, layer_path: str) -> dict[str, ParsedAxisMap]:
    """Split the axis map of a stacked leaf into one axis map per layer.

    An axis map relates the dims of a leaf to the dims of its tensors, e.g. `a b <- w: b a` for a transposed tensor.

    Returns:
        Path of each layer's leaf -> its axis map. A leaf without a stack axis keeps its path and axis map.
    """
    axis = stack_axis(row.leaf_dims)
    if axis is None:
        return {path: row}
    leaf_dims = (*row.leaf_dims[:axis], *row.leaf_dims[axis + 1 :])
    position = next(
        position
        for position, part in enumerate(row.name_parts)
        if isinstance(part, NamePattern) and part.terms[0].atom == row.leaf_dims[axis][0]
    )
    pattern = row.name_parts[position]
    assert isinstance(pattern, NamePattern)
    rows: dict[str, ParsedAxisMap] = {}
    for number in pattern.numbers:
        name_parts = (
            *row.name_parts[:position],
            str(number),
            *row.name_parts[position + 1 :],
        )
        path_of_layer = escape_path(layer_path.format(number))
        rows[path_of_layer] = dataclasses.replace(
            row, text=path_of_layer, leaf_dims=leaf_dims, name_parts=name_parts
        )
    return rows


def layout_rows(
    layout: TreeLayout,
    config: HFConfig,
    stack_axis_index: int | None = None,
    *,
    sizes: Sizes = MappingProxyType({}),
    tensors: StoredShapes = MappingProxyType({}),
) -> dict[str, ParsedAxisMap]:
    """Return the parsed axis-map rows of a model in the tree of another library.

    Args:
        layout: The tree.
        config: Content of the model's config.json.
        stack_axis_index: Axis of the stacked layers, or None for a tree with one leaf per layer.
        sizes: Size of each named axis (atom). Required with `tensors`.
        tensors: Shapes of the stored tensors. They decide between the forms of a parameter.

    Returns:
        Path in the tree -> row.

    Raises:
        PrepError: The tensors of a row and of its alternate both exist.
    """
    rows: dict[str, ParsedAxisMap] = {}
    numbers = layout.layer_numbers(config)
    if tensors:
        for path, _, row in _select_forms(layout.parameters, config, sizes, numbers, tensors):
            rows[path] = row
    else:
        for path, parameter in active_parameters(layout.parameters, config):
            rows[path] = number_tensors(parse_row(parameter.row), numbers)
    if stack_axis_index is None:
        return rows
    return dict(
        _stack_row(path, row, stack_axis_index, layout.stacked_name) for path, row in rows.items()
    )


def active_parameters(
    parameters: Mapping[str, Parameter], config: HFConfig
) -> Iterator[tuple[str, Parameter]]:
    """Yield path and parameter of each parameter of a model with this config."""
    for path, parameter in parameters.items():
        if resolved := parameter.resolve(config):
            yield path, resolved


def layer_atom_in(path: str) -> str:
    """Return the named axis (atom) of layers in a path, e.g. `layers` in `layers.{layers}.w`, or ""."""
    return next((atom for atom in LAYER_ATOMS if f"{{{atom}}}" in path), "")


def _stack_row(
    path: str, row: ParsedAxisMap, axis: int, stacked_name: str
) -> tuple[str, ParsedAxisMap]:
    """Put the layers of a row into one leaf, stacked on an axis."""
    atom = layer_atom_in(path)
    if not atom:
        return path, row
    stacked = dataclasses.replace(row, leaf_dims=((atom,), *row.leaf_dims))
    parts = path.split(".")
    for number, part in enumerate(parts):
        if f"{{{atom}}}" in part:
            parts[number] = stacked_name
    return ".".join(parts), _move_stack_axis(stacked, axis)


def _first_tensor(row: ParsedAxisMap, sizes: Sizes) -> str:
    name, _ = next(bind_row(row, sizes).tensors())
    return name


def _select_forms(
    parameters: Mapping[str, Parameter],
    config: HFConfig,
    sizes: Sizes,
    numbers: Mapping[str, Sequence[int]],
    tensors: StoredShapes,
) -> Iterator[tuple[str, Parameter, ParsedAxisMap]]:
    """Yield the path, the parameter and the row of each parameter, in the form of the stored tensors."""
    active = list(active_parameters(parameters, config))
    is_transposed = False
    if any(parameter.transposed for _, parameter in active):
        is_transposed = _is_transposed(active, sizes, numbers, tensors)
    for path, parameter in active:
        yield path, parameter, _select_form(parameter, sizes, numbers, tensors, is_transposed)


def _is_transposed(
    parameters: Sequence[tuple[str, Parameter]],
    sizes: Sizes,
    numbers: Mapping[str, Sequence[int]],
    tensors: StoredShapes,
) -> bool:
    """Return whether the file has the `transposed` form of its parameters.

    A file has all of them in one form. The shape of one tensor may allow both, and then another one decides. E.g. with
    embed 4 and mlp 2, gate and up are [experts, 4, 4] in both forms, but down is [experts, 4, 2] or [experts, 2, 4]. A
    file with gate and up as well as down square would need embed = 2 mlp = mlp.
    """
    is_transposed = False
    for _, parameter in parameters:
        if not parameter.transposed:
            continue
        form = bind_row(number_tensors(parse_row(parameter.alternate), numbers), sizes)
        transposed = bind_row(number_tensors(parse_row(parameter.transposed), numbers), sizes)
        name, _ = next(form.tensors())
        shape = tuple(tensors.get(name, ()))
        if shape == form.source_shape != transposed.source_shape:
            return False
        if shape == transposed.source_shape != form.source_shape:
            is_transposed = True
    return is_transposed


def _select_form(
    parameter: Parameter,
    sizes: Sizes,
    numbers: Mapping[str, Sequence[int]],
    tensors: Collection[str],
    is_transposed: bool,
) -> ParsedAxisMap:
    """Return the row, its alternate, or its transposed alternate: the one that the checkpoint has."""
    if parameter.parsed_row is not None:
        return parameter.parsed_row
    row = number_tensors(parse_row(parameter.row), numbers)
    if not parameter.alternate:
        return row
    alternate = number_tensors(parse_row(parameter.alternate), numbers)
    # One tensor is enough: a file stores all layers and experts of a parameter in one form.
    row_tensor = _first_tensor(row, sizes)
    alternate_tensor = _first_tensor(alternate, sizes)
    if row_tensor in tensors and alternate_tensor in tensors:
        raise PrepError(
            "a parameter is stored in two forms",
            f"{row_tensor} and {alternate_tensor}",
            "keep one of them",
        )
    if alternate_tensor not in tensors:
        return row
    if is_transposed and parameter.transposed:
        return number_tensors(parse_row(parameter.transposed), numbers)
    return alternate


def _unstack_row(path: str, row: ParsedAxisMap) -> tuple[str, ParsedAxisMap]:
    """Split a row with stacked layers into one leaf per layer."""
    axis = stack_axis(row.leaf_dims)
    if axis is None:
        return path, row
    (atom,) = row.leaf_dims[axis]
    # Only the first occurrence: decoder.layers.attn.q -> decoder.layers.{layers}.attn.q.
    layer_path = path.replace(f"{LAYERS}.", f"{LAYERS}.{{{atom}}}.", 1)
    return layer_path, dataclasses.replace(
        row, leaf_dims=(*row.leaf_dims[:axis], *row.leaf_dims[axis + 1 :])
    )


def _move_stack_axis(row: ParsedAxisMap, axis: int) -> ParsedAxisMap:
    """Move the axis of the layers."""
    old_axis = stack_axis(row.leaf_dims)
    if old_axis is None:
        return row
    dims = [*row.leaf_dims[:old_axis], *row.leaf_dims[old_axis + 1 :]]
    # A leaf may have fewer dims than the axis, e.g. a norm's [layers, embed] with axis 2 becomes
    # [embed, layers].
    dims.insert(min(axis, len(dims)), row.leaf_dims[old_axis])
    return dataclasses.replace(row, leaf_dims=tuple(dims))
