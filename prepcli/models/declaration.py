"""A family as one declaration: its parameters, its sizes, and the choices of its layers. No I/O, no jax.

A choice is a field of `ArchConfig`: a value, or a function of the config and the sizes. The fields of a config that a
family supports are the ones that it reads: another field with an effect on some decoder of transformers is refused.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models import rows
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import ATTENTION_DROPOUT, DropoutFields
from prepcli.models.parameters import (
    Condition,
    Family,
    LazyLayouts,
    Parameter,
    TreeLayout,
    condition_holds,
)
from prepcli.models.rows import Parameters, stack
from prepcli.planning.libraries import TREES, find_library

# Configs whose fields have other names in published files. No I/O, no jax.


class AliasedConfig(Mapping[str, JsonValue]):
    """A config in which some fields have two names. The alias overrides, as in `attribute_map` of transformers.

    >>> config = AliasedConfig({"num_layers": 2}, {"num_layers": "num_hidden_layers"})
    >>> config.get("num_hidden_layers")
    2
    """

    def __init__(self, config: HFConfig, aliases: Mapping[str, str]) -> None:
        """Wrap a config.

        Args:
            config: Content of a config.json.
            aliases: Alias -> name of the field that the family reads.
        """
        self.config = config
        self.aliases = aliases
        self._aliases = {name: alias for alias, name in aliases.items()}

    def stored_name(self, name: str) -> str:
        """Return the alias of a field, which overrides it, or the field's name if it has none."""
        return self._aliases.get(name, name)

    def __getitem__(self, key: str) -> JsonValue:
        alias = self._aliases.get(key)
        names = [key] if alias is None else [alias, key]
        # A recorded config records each name that is read. A family supports all of them.
        values = {name: self.config.get(name) for name in names}
        for name, value in values.items():
            if value is not None or name in self.config:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys(self.config)
        names |= dict.fromkeys(
            name for name, alias in self._aliases.items() if alias in self.config
        )
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# Named axis (atom) -> extent.
Sizes = Mapping[str, int]
# Choice of the architecture -> its value, or a function of the config and the sizes.
Choices = Mapping[str, Any]
# Config and number of its layers -> numbers of some layers.
LayerNumbers = Callable[[HFConfig, int], tuple[int, ...]]
NO_CHOICES: Choices = MappingProxyType({})


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
    if isinstance(config, AliasedConfig):
        stored = {config.stored_name(name): value for name, value in fields.items()}
        return AliasedConfig(changed(config.config, **stored), config.aliases)
    copy = {**config, **fields}
    if not isinstance(config, RecordedConfig):
        return copy
    recorded = RecordedConfig(copy)
    recorded.fields = config.fields
    return recorded


class LayerGroup(NamedTuple):
    """Parameters that some or all layers have.

    Attributes:
        parameters: Parameters of one of these layers.
        numbers: Numbers of these layers.
        may_be_all: Whether they may be all layers of a model.
    """

    parameters: Parameters
    numbers: LayerNumbers
    may_be_all: bool = True


NO_GROUPS: Mapping[str, LayerGroup] = MappingProxyType({})


class Settings(TypedDict, total=False):
    """Facts of a family with a usual value.

    Attributes:
        choices: Fields of the architecture that differ.
        groups: Path part and atom of a group -> parameters of some layers. They are in `layers` if all layers have
            them, and else in a stack of the group's layers.
        check: Raises PrepError for a config that the readers accept although it is not supported.
        ignores: Semantic fields that transformers' class does not read, or only without other fields. A config may have
            them.
        tied: Whether the head is tied if the config does not say. Default: it is not.
        dropped: Pattern of tensors to ignore -> their description.
        dropout_fields: Fields of the config with dropout rates.
        prediction_layers: Number of layers for multi-token prediction if the config does not state it.
    """

    choices: Choices
    groups: Mapping[str, LayerGroup]
    check: Callable[[HFConfig, Sizes], None]
    ignores: Iterable[str]
    tied: bool
    dropped: Mapping[str, str]
    dropout_fields: DropoutFields
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
    return rows.build_family(
        name=name,
        prefix=prefix,
        sizes=all_sizes if groups else sizes,
        arch_config=supporting(
            all_sizes,
            arch,
            conditional,
            settings.get("choices", NO_CHOICES),
            check=settings.get("check"),
            ignores=settings.get("ignores", ()),
        ),
        parameters=parameters,
        tied_by_default=settings.get("tied", False),
        dropped=settings.get("dropped", {}),
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
    """Return families by their model types, with their trees of other libraries."""
    named: dict[str, Family] = {}
    for family in families:
        layouts = LazyLayouts(partial(_foreign_trees, family))
        named[family.name] = dataclasses.replace(family, layouts=layouts)
    return named


def _foreign_trees(family: Family) -> dict[str, TreeLayout]:
    trees: dict[str, TreeLayout] = {}
    # Messages list the trees in this order: by module, as in the option, and within a module as its maker returns them.
    for module in dict.fromkeys(find_library(tree).module for tree in TREES):
        makers = importlib.import_module(f"prepcli.models.{module}").TREES
        if family.name in makers:
            trees |= makers[family.name](family)
    return trees


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
