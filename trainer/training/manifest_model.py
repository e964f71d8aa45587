"""The model of a checkpoint's manifest, its partition rules, and the check of a mesh against them.

Readers of parameters import this module without the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.models.lora_config import lora_from_manifest
from prepcli.models.registry import family_of
from prepcli.models.rule_text import merge_rules
from prepcli.models.rules import Rules, check_leaf_rules
from trainer.distributed.sharding import ShardingContext
from trainer.nn.model_spec import ModelSpec, build_model


def model_from_manifest(manifest: Mapping[str, Any]) -> ModelSpec:
    """Build the ModelSpec of a checkpoint's manifest.

    Layers are stacked as in the checkpoint.
    """
    config = manifest["config"]
    return build_model(
        family_of(config),
        config,
        manifest["tied"],
        scan=manifest["scan"],
        scan_axis=manifest["scan_axis"],
        lora=lora_from_manifest(manifest),
    )


def rules_from_manifest(manifest: Mapping[str, Any]) -> Rules:
    """Return the partition rules of a checkpoint."""
    return merge_rules(manifest["rules"])


def check_mesh_divides(model: ModelSpec, sharding: ShardingContext) -> None:
    """Check that the mesh divides every parameter, and that each rule of leaves is for some of them.

    Raises:
        UsageError: The mesh does not divide a parameter, or a rule of leaves does not fit the parameters.
    """
    check_leaf_rules(sharding.rules, {path: leaf.dims for path, leaf in model.leaves.items()})
    for leaf in model.leaves.values():
        try:
            sharding.param_spec(leaf)
        except PrepError as error:
            command = Command(
                "save-init",
                "MODEL",
                Option("mesh", str(sharding.mesh)),
                Option("pad_vocab", "auto"),
            )
            hint = text(
                "another mesh, or a checkpoint made for this one: {}, or with {} of {}",
                command,
                Option("rules"),
                Command("save-init"),
            )
            raise usage_error(error.what, error.why, hint) from error
