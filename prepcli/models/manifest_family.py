"""The family of a checkpoint's parameters, from its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.models.lora import lora_family
from prepcli.models.lora_config import lora_from_manifest
from prepcli.models.parameters import VERBATIM, Family
from prepcli.models.registry import family_of
from prepcli.models.text_part import with_prefixes
from prepcli.models.verbatim import recorded_family


def manifest_family(manifest: Mapping[str, Any]) -> Family:
    """Return the family of a checkpoint's parameters: of the model, of its adapters, or of verbatim tensors."""
    if manifest.get("family") == VERBATIM:
        return recorded_family(manifest)
    config = manifest["config"]
    lora = lora_from_manifest(manifest)
    family = family_of(config)
    # Adapters have the names of the text model alone.
    if lora is not None:
        return lora_family(family, config, lora)
    if towers := manifest.get("towers"):
        return with_prefixes(
            family, _read_prefix(towers, "prefix"), _read_prefix(towers, "head_prefix")
        )
    return family


def _read_prefix(towers: Mapping[str, Any], key: str) -> str:
    """Return a prefix of tensor names in a manifest."""
    prefix = towers.get(key)
    if not isinstance(prefix, str):
        why = f"`towers` has the {key} {prefix!r:.60}"
        raise PrepError("the manifest is invalid", why, GET_AGAIN_HINT)
    return prefix
