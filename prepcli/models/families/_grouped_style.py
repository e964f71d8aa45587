"""Families whose layers differ in their parameters: some have experts, attention or a mixer. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prepcli.algebra.axis_map import LAYERS
from prepcli.models import rows
from prepcli.models.architecture import ArchConfig
from prepcli.models.dropout_config import ATTENTION_DROPOUT, DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import Family, HFConfig, condition_holds
from prepcli.models.rows import Parameters, embedding, stack

# Config -> extent of each atom.
Sizes = Callable[[HFConfig], dict[str, int]]
# Config -> numbers of some layers.
LayerNumbers = Callable[[HFConfig], tuple[int, ...]]


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


def build_family(
    name: str,
    sizes: Sizes,
    arch_config: Callable[[HFConfig], ArchConfig],
    *,
    layer: Parameters,
    groups: Mapping[str, LayerGroup],
    prefix: str = _llama_style.TENSOR_PREFIX,
    tokens: str = "embed_tokens.weight",
    shared: Parameters | None = None,
    final_norm: Parameters = _llama_style.FINAL_RMS_NORM,
    head: Parameters = _llama_style.HEAD,
    tied_by_default: bool = False,
    dropped: Mapping[str, str] = _llama_style.LEGACY_BUFFERS,
    dropout_fields: DropoutFields = ATTENTION_DROPOUT,
    default_prediction_layers: int = 0,
) -> Family:
    """Return a family whose layers differ in their parameters.

    The parameters of a group are in `layers` if all layers have them, and else in a stack of the group's layers.

    Args:
        name: `model_type` of its config.json.
        sizes: Atom -> extent. Those of groups may be absent.
        arch_config: The architecture.
        layer: Parameters of every layer.
        groups: Path part and atom of a group -> its layers.
        prefix: Prefix of its tensors.
        tokens: Tensor of the token embeddings.
        shared: Parameters outside of layers, other than the token embedding, the last norm and the head.
        final_norm: Parameters of the norm after the last layer.
        head: Parameters of the output head.
        tied_by_default: Whether the head is tied if the config does not say.
        dropped: Pattern of tensors to ignore -> their description.
        dropout_fields: Fields of the config with dropout rates.
        default_prediction_layers: Number of layers for multi-token prediction if the config does not state it.
    """

    def layer_numbers(config: HFConfig) -> dict[str, tuple[int, ...]]:
        num_layers = sizes(config)[LAYERS]
        numbers = {group: members.numbers(config) for group, members in groups.items()}
        return {group: listed for group, listed in numbers.items() if 0 < len(listed) < num_layers}

    def all_sizes(config: HFConfig) -> dict[str, int]:
        axis_sizes = sizes(config)
        counts = {group: len(numbers) for group, numbers in layer_numbers(config).items()}
        return {**axis_sizes, **counts}

    parameters = stack(LAYERS, "layers.{layers}", layer)
    for group, members in groups.items():
        parameters |= _group_parameters(group, members, sizes)
    return rows.build_family(
        name=name,
        prefix=prefix,
        sizes=all_sizes,
        arch_config=arch_config,
        parameters={
            **embedding("tokens", f"vocab embed <- {tokens}: vocab embed"),
            **(shared or {}),
            **parameters,
            **final_norm,
            **head,
        },
        tied_by_default=tied_by_default,
        dropped=dropped,
        dropout_fields=dropout_fields,
        layer_numbers=layer_numbers,
        default_prediction_layers=default_prediction_layers,
    )


def _group_parameters(group: str, members: LayerGroup, sizes: Sizes) -> Parameters:
    """Return the parameters of a group, both in `layers` and in a stack of its layers, each under its condition."""

    def has_all_layers(config: HFConfig) -> bool:
        return len(members.numbers(config)) == sizes(config)[LAYERS]

    def has_some_layers(config: HFConfig) -> bool:
        return 0 < len(members.numbers(config)) < sizes(config)[LAYERS]

    parameters: Parameters = {}
    if members.may_be_all:
        in_layers = under_condition(members.parameters, has_all_layers)
        parameters |= stack(LAYERS, "layers.{layers}", in_layers)
    grouped = under_condition(members.parameters, has_some_layers)
    return parameters | stack(group, f"layers.{{{group}}}", grouped)


def under_condition(parameters: Parameters, condition: Callable[[HFConfig], bool]) -> Parameters:
    """Return parameters that exist if their own condition and another one hold."""
    limited: Parameters = {}
    for path, parameter in parameters.items():

        def holds(config: HFConfig, inner: Any = parameter.condition) -> bool:
            return condition(config) and condition_holds(config, inner)

        limited[path] = dataclasses.replace(parameter, condition=holds)
    return limited
