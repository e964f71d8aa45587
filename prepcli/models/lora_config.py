"""The settings of low-rank adapters (LoRA, arXiv:2106.09685), and their entry in a manifest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.core.json_values import JsonObject
from prepcli.models.parameters import MAX_AXIS_SIZE

DEFAULT_TARGETS = ("attn.q", "attn.v")
# Far above any setting. Larger numbers overflow float32.
MAX_ALPHA = 1e30


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of adapters.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Scale of the update before it is divided by the rank.
        targets: Patterns of projections, such as `attn.q` or `mlp.*`, or `all-linear`.
        use_rslora: Divide by the square root of the rank instead (arXiv:2312.03732).
        dropout: Fraction of the input of A to drop in training.
        rank_pattern: Regular expression of modules -> their rank in place of `rank`. The first match counts.
        alpha_pattern: Regular expression of modules -> their alpha in place of `alpha`.
        modules_to_save: Embeddings and head that are trained as a whole, e.g. `embed.tokens` or `head`.
        target_parameters: Patterns of projections of experts, such as `mlp.gate`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = DEFAULT_TARGETS
    use_rslora: bool = False
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()

    @property
    def scaling(self) -> float:
        """Factor of B A for modules without a rank or alpha of their own."""
        return self.scaling_of(self.rank, self.alpha)

    def scaling_of(self, rank: int, alpha: float) -> float:
        """Return the factor of B A for a rank and an alpha."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def manifest_entry(self) -> JsonObject:
        """Return the settings for a manifest. Settings that adapters rarely have are absent if they are not set."""
        entry: JsonObject = {
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": list(self.targets),
            "use_rslora": self.use_rslora,
        }
        for name in OPTIONAL_SETTINGS:
            value = getattr(self, name)
            if value:
                entry[name] = _json_value(value)
        return entry


# Settings with a default of 0 or of no entries.
OPTIONAL_SETTINGS = tuple(item.name for item in dataclasses.fields(LoraConfig))[4:]


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def lora_from_manifest(manifest: Mapping[str, Any]) -> LoraConfig | None:
    """Return the settings of adapters in a manifest, or None if it has none.

    Raises:
        PrepError: They are invalid.
    """
    lora = manifest.get("lora")
    if lora is None:
        return None
    if not _is_lora_config(lora):
        what = "the manifest has invalid settings of adapters"
        raise PrepError(what, f"`lora` is {ascii(lora)[:60]}", GET_AGAIN_HINT)
    alphas = lora.get("alpha_pattern", {})
    return LoraConfig(
        lora["rank"],
        float(lora["alpha"]),
        targets=tuple(lora["targets"]),
        use_rslora=lora["use_rslora"],
        dropout=float(lora.get("dropout", 0.0)),
        rank_pattern=dict(lora.get("rank_pattern", {})),
        alpha_pattern={pattern: float(alpha) for pattern, alpha in alphas.items()},
        modules_to_save=tuple(lora.get("modules_to_save", ())),
        target_parameters=tuple(lora.get("target_parameters", ())),
    )


def _is_lora_config(value: Any) -> bool:
    """Return whether a value of a manifest has the keys of a `LoraConfig`, of its types and in its ranges."""
    if not isinstance(value, Mapping):
        return False
    dropout = value.get("dropout", 0.0)
    is_rate = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    lists = (value.get("targets"), *(value.get(key, ()) for key in _NAME_LISTS))
    patterns = (value.get("rank_pattern", {}), value.get("alpha_pattern", {}))
    return (
        _is_rank(value.get("rank"))
        and _is_alpha(value.get("alpha"))
        and isinstance(value.get("use_rslora"), bool)
        and is_rate
        and 0 <= dropout < 1
        and all(map(_is_name_list, lists))
        and all(isinstance(pattern, Mapping) for pattern in patterns)
        and all(map(_is_rank, patterns[0].values()))
        and all(map(_is_alpha, patterns[1].values()))
    )


_NAME_LISTS = ("modules_to_save", "target_parameters")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_AXIS_SIZE


def _is_alpha(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MAX_ALPHA


def _is_name_list(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(name, str) for name in value)
