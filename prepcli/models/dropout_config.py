"""Rates of dropout and of forgetful causal masking, and the dropout rates in a Hugging Face config. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from prepcli.core.errors import invalid_config_error, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig

DROPOUT_KEY = "model.dropout"
FCM_KEY = "model.fcm_ratio"
# Name of a config field and its default. None: transformers does not drop there.
ConfigField = tuple[str, float] | None


@dataclass(frozen=True, slots=True)
class DropoutConfig:
    """Rates of the random masks of training.

    Attributes:
        attention: Rate of dropout of attention probabilities.
        residual: Rate of dropout of the outputs of attention and MLP, before they are added to the
            residual stream.
        embedding: Rate of dropout of the input of the first layer.
        fcm_ratio: Smallest and largest fraction of the keys that forgetful causal masking hides in
            a row.
        adapters: Rate of dropout of the inputs of adapters.
    """

    attention: float = 0.0
    residual: float = 0.0
    embedding: float = 0.0
    fcm_ratio: tuple[float, float] = (0.0, 0.0)
    adapters: float = 0.0

    @property
    def is_active(self) -> bool:
        """Whether training needs random numbers."""
        rates = (self.attention, self.residual, self.embedding, self.adapters)
        return any((*rates, *self.fcm_ratio))


NO_DROPOUT = DropoutConfig()
# Sites of `model.dropout`. Adapters have a rate of their own, and `fcm_ratio` is a range.
DROPOUT_SITES = ("attention", "residual", "embedding")


@dataclass(frozen=True, slots=True)
class DropoutFields:
    """The fields of a family's config.json with the rate of each site of dropout."""

    attention: ConfigField = ("attention_dropout", 0.0)
    residual: ConfigField = None
    embedding: ConfigField = None


# Fields of families that drop attention probabilities only.
ATTENTION_DROPOUT = DropoutFields()


def read_dropout(config: HFConfig, dropout_fields: DropoutFields) -> dict[str, float]:
    """Return the dropout rate of each site in a config.json. A field that is absent or null has its default.

    Raises:
        PrepError: A rate is not a number from 0 to below 1.
    """
    return {site: _read_rate(config, getattr(dropout_fields, site)) for site in DROPOUT_SITES}


def _read_rate(config: HFConfig, config_field: ConfigField) -> float:
    """Return the rate in a field of config.json, 0 for a family without the field."""
    if config_field is None:
        return 0.0
    name, default = config_field
    value = config.get(name)
    if value is None:
        return default
    if not _is_rate(value):
        raise invalid_config_error(
            f"{name} is {value!r:.60}, it must be a number from 0 to below 1"
        )
    return float(value)


def _is_rate(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def resolve_dropout(
    value: float | str | Mapping[str, float],
    *,
    fcm_ratio: tuple[float, float],
    config: HFConfig,
    dropout_fields: DropoutFields,
) -> DropoutConfig:
    """Return the rates of a run.

    Args:
        value: `model.dropout`: one rate, the rates of some sites, or "config" for the rates in
            the config.
        fcm_ratio: `model.fcm_ratio`.
        config: Content of the checkpoint's config.json.
        dropout_fields: Its fields with dropout rates.

    Raises:
        PrepError: The rates of the config are needed, and one is invalid.
    """
    if isinstance(value, str):
        rates = read_dropout(config, dropout_fields)
    else:
        rates = dict(value) if isinstance(value, Mapping) else dict.fromkeys(DROPOUT_SITES, value)
    return DropoutConfig(**rates, fcm_ratio=fcm_ratio)


def check_dropout_table(table: Mapping[str, object]) -> None:
    """Check a table of dropout rates by site.

    Raises:
        UsageError: A site is unknown, or a rate is not a number from 0 to below 1.
    """
    for site, rate in table.items():
        if site not in DROPOUT_SITES:
            what = f"`{DROPOUT_KEY}` has the unknown key `{site:.60}`"
            raise usage_error(
                what, f"the keys are {', '.join(DROPOUT_SITES)}", did_you_mean(site, DROPOUT_SITES)
            )
        if not _is_rate(rate):
            what = f"`{site}` of `{DROPOUT_KEY}` is {rate!r:.60}"
            raise usage_error(
                what, "a rate is a number from 0 to below 1", f"`{DROPOUT_KEY} = {{{site} = 0.1}}`"
            )


def check_fcm_ratio(ratio: tuple[float, float]) -> None:
    """Raise a UsageError if the smallest fraction of hidden keys exceeds the largest."""
    low, high = ratio
    if low > high:
        why = f"the minimum {low} is above the maximum {high}"
        raise usage_error(f"`{FCM_KEY}` is [{low}, {high}]", why, f"`{FCM_KEY} = [{high}, {low}]`")
