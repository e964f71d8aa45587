"""A model without its weights: config, layout, and the shapes of its parameters on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prepcli.models.architecture import ArchConfig
from prepcli.models.mesh import Mesh
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import Family, HFConfig, true_vocab_size
from prepcli.models.partition import vocab_multiple
from prepcli.models.registry import family_of
from prepcli.models.rules import Rules
from trainer.planning.config_overrides import override_fields
from trainer.planning.step_inputs import ModelShapes
from trainer.recipe.model_table import Model
from trainer.recipe.rope_overrides import override_rope


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        config: Content of its config.json.
        is_tied: Whether the LM head is the token embedding.
        scan: Whether each parameter of the layers is one leaf.
        scan_axis: The axis over which layers are stacked.
        is_converted: Whether it is a checkpoint of prep, with a vocabulary that already has its padding.
    """

    config: HFConfig
    is_tied: bool
    scan: bool = True
    scan_axis: int = 0
    is_converted: bool = False

    @property
    def family(self) -> Family:
        """The family of the config."""
        return family_of(self.config)

    @property
    def arch_config(self) -> ArchConfig:
        """The choices of its layers. Raise PrepError if the config is invalid."""
        return self.family.arch_config(self.config)

    @property
    def true_vocab_size(self) -> int:
        """Vocabulary size without padding. Raise PrepError if the config is invalid."""
        return true_vocab_size(self.family, self.config)

    def shapes(self, mesh: Mesh, rules: Rules) -> ModelShapes:
        """Return the architecture and the parameters, with the vocabulary of `--pad-vocab auto` before conversion.

        Raises:
            PrepError: The config is invalid or needs an unsupported feature.
        """
        config = self._padded_config(mesh, rules)
        return ModelShapes(family_of(config).arch_config(config), self._leaves_of_config(config))

    def manifest(self, mesh: Mesh, rules: Rules) -> dict[str, Any]:
        """Return the entries of a checkpoint's manifest that describe the model, except its rules."""
        config = self._padded_config(mesh, rules)
        return {
            "config": config,
            "tied": self.is_tied,
            "scan": self.scan,
            "scan_axis": self.scan_axis,
        }

    def _padded_config(self, mesh: Mesh, rules: Rules) -> HFConfig:
        """Return the config with the vocabulary that the checkpoint has after its conversion."""
        # Rows are padded during the conversion. Another mesh adds none to the files of a checkpoint.
        if self.is_converted:
            return self.config
        vocab = family_of(self.config).sizes(self.config)["vocab"]
        dims = {path: leaf.dims for path, leaf in self._leaves_of_config(self.config).items()}
        multiple = vocab_multiple(dims, mesh, rules)
        # Round up, e.g. 50257 rows for a multiple of 64 -> 50304.
        padded = -(-vocab // multiple) * multiple
        if padded == vocab:
            return self.config
        return {**self.config, "vocab_size": padded, "true_vocab_size": vocab}

    def _leaves_of_config(self, config: HFConfig) -> dict[str, ParamLeaf]:
        """Return the parameters of a config with the layout of this model."""
        return param_leaves(
            family_of(config), config, self.is_tied, scan=self.scan, scan_axis=self.scan_axis
        )

    def of_recipe(self, table: Model) -> PlannedModel:
        """Return the model with the changes of a recipe. See `recipe_config`."""
        return replace(self, config=recipe_config(self.config, table))


def recipe_config(config: HFConfig, table: Model) -> HFConfig:
    """Return a config.json with the overrides and the rotary embedding of a recipe.

    Args:
        config: Content of the config.json.
        table: The recipe's `[model]`.

    Raises:
        PrepError: The model does not support the rotary embedding, or a field or its value is
            invalid.
    """
    return override_rope(override_fields(config, table.overrides), table.rope_overrides)


def model_of_config(config: HFConfig, *, has_stored_head: bool = False) -> PlannedModel:
    """Return the model of a config.json before its conversion.

    Args:
        config: Content of the config.json.
        has_stored_head: Whether the checkpoint stores the head's tensor.

    Raises:
        PrepError: The model's family is not supported.
    """
    family = family_of(config)
    tensors = (family.tying.head_tensor,) if has_stored_head else ()
    return PlannedModel(config, family.is_tied(config, tensors))


def model_of_manifest(manifest: Mapping[str, Any]) -> PlannedModel:
    """Return the model of a checkpoint of prep."""
    return PlannedModel(
        manifest["config"],
        manifest["tied"],
        manifest["scan"],
        manifest["scan_axis"],
        is_converted=True,
    )
