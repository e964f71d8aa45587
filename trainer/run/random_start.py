"""The start of a run with random parameters: config, manifest and tokenizer files, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.engine.checkpoint_store import LeafSpec
from prepcli.models.parameters import read_size
from prepcli.models.registry import family_of
from prepcli.models.rule_text import merge_rules
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.references import CONFIG
from prepcli.sources.source import read_config
from prepcli.sources.tensor_match import TRUE_VOCAB_SIZE_KEY
from prepcli.targets.hf_folder import random_start_files
from prepcli.targets.training_step import StartModel
from trainer.planning.config_overrides import override_fields
from trainer.planning.model_shapes import PlannedModel, model_of_config
from trainer.recipe import Recipe
from trainer.recipe.model_table import Model

if TYPE_CHECKING:
    from prepcli.models.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RandomReader:
    """A CheckpointReader without leaves: the parameters are initialized on the devices.

    Attributes:
        manifest: The manifest that an init of the model would have.
    """

    manifest: Manifest
    is_remote = False

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """No leaves."""
        return {}

    def __enter__(self) -> RandomReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: no file is open."""


def random_config(table: Model) -> JsonObject:
    """Return the config.json of a random start, with the overrides of the recipe.

    Raises:
        PrepError: The preset is unknown, the file is missing or invalid, or a field or its value is invalid.
    """
    if table.preset is not None:
        from prepcli.models.presets import find_preset

        return override_fields(find_preset(table.preset), table.overrides)
    assert table.config is not None
    path = Path(table.config)
    if path.is_dir():
        path = path / CONFIG
    return override_fields(read_config(path), table.overrides)


def random_start(recipe: Recipe, mesh: Mesh, rules: Sequence[str]) -> StartModel:
    """Return the settings and files of a random start.

    Args:
        recipe: A recipe whose `model.init` is random.
        mesh: Mesh without axes of size -1. The vocabulary is padded to a size that it divides.
        rules: Partition rules.

    Raises:
        PrepError: The config is invalid or not supported, or there is no tokenizer.
    """
    model = model_of_config(random_config(recipe.model))
    manifest = _model_manifest(model, mesh, rules)
    manifest |= Manifest(name=_model_name(recipe.model))
    files = random_start_files(recipe.data.tokenizer, recipe.model.config)
    return StartModel(manifest, files)


def _model_manifest(model: PlannedModel, mesh: Mesh, rules: Sequence[str]) -> Manifest:
    """Return the entries of the manifest that `prep save-init` would write for a model."""
    family = family_of(model.config)
    described = model.manifest(mesh, merge_rules(rules))
    config: HFConfig = described["config"]
    padded_size = family.sizes(config)["vocab"]
    return Manifest(
        config=config,
        tied=described["tied"],
        scan=described["scan"],
        scan_axis=described["scan_axis"],
        kind="init",
        family=family.name,
        vocab={
            "true": read_size(config, TRUE_VOCAB_SIZE_KEY, padded_size),
            "padded": padded_size,
        },
        layout="native",
        # No checkpoint shows how its tensors are named. A complete model with its head has the prefix,
        # e.g. `model.layers.0` of Llama.
        prefixed=True,
        mesh=str(mesh),
        rules=list(rules),
    )


def _model_name(table: Model) -> str:
    """Return the name of the model: its preset, or the folder of its config."""
    if table.preset:
        return table.preset
    # `Path('.').name` is empty, and the resolved path ends with the name of the folder.
    path = Path(table.config or "").resolve()
    if path.is_dir():
        return path.name
    return path.parent.name
