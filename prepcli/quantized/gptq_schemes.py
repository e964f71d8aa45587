"""The bits and group sizes of a GPTQ model whose modules have different settings.

GPTQModel's `dynamic` maps regular expressions of module names to settings. A rule `-:REGEX` leaves the modules as
floats: they have no words. A rule `+:REGEX` or `REGEX` changes settings of the modules. No expression of a file is run
here: the shapes of a module's tensors show which of the settings it has. Source: `dynamic_get` of GPTQModel 4
(gptqmodel/quantization/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.core.errors import PrepError
from prepcli.core.json_values import quote_name
from prepcli.planning.arrays import Array
from prepcli.quantized.gptq import BITS
from prepcli.quantized.packed_ints import WORD_BITS, word_count
from prepcli.quantized.stored_weights import USE_ORIGINAL_HINT, setting

SKIP_RULE = "-:"
# Settings of a rule with effect on the values that are stored, but not on how they are stored.
QUANTIZER_KEYS = frozenset(
    (
        "act_group_aware",
        "damp_auto_increment",
        "damp_percent",
        "desc_act",
        "mse",
        "static_groups",
        "sym",
        "true_sequential",
    )
)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """Settings of modules.

    Attributes:
        bits: Bits per code.
        group_size: Inputs of a group, or None if all groups have the same number of inputs.
    """

    bits: int
    group_size: int | None

    def fits(self, weight: Array, zeros: Array) -> bool:
        """Return whether words of codes [inputs, outputs] and of zero points [groups, outputs] have the settings."""
        if len(zeros.shape) != 2:
            return False
        groups, zero_words = zeros.shape
        words, outputs = weight.shape
        inputs = words * WORD_BITS // self.bits
        if word_count(inputs, self.bits) != words or word_count(outputs, self.bits) != zero_words:
            return False
        return self.group_size is None or groups == -(-inputs // self.group_size)


def gptq_schemes(settings: Mapping[str, Any], settings_file: str) -> list[GptqScheme]:
    """Return the settings of a model, and then those that the rules of `dynamic` give to modules.

    Raises:
        PrepError: A rule is not supported.
    """
    schemes = [_scheme(settings)]
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise _rule_error("`dynamic` has no rules", settings_file)
    for pattern, changes in rules.items():
        if pattern.startswith(SKIP_RULE):
            continue
        if not isinstance(changes, Mapping):
            raise _rule_error(f"the rule {pattern!r:.60} has no settings", settings_file)
        for key in changes.keys() - QUANTIZER_KEYS - {"bits", "group_size"}:
            raise _rule_error(f"the rule {pattern!r:.60} changes {key!r:.60}", settings_file)
        schemes.append(_scheme({**settings, **changes}))
    return [*dict.fromkeys(schemes)]


def _scheme(settings: Mapping[str, Any]) -> GptqScheme:
    group_size = settings.get("group_size")
    # -1 stands for one group of all inputs.
    if type(group_size) is not int or group_size < 1:
        group_size = None
    return GptqScheme(setting(settings, "bits", BITS, 4), group_size)


def _rule_error(why: str, settings_file: str) -> PrepError:
    return PrepError(
        "modules with other settings are not supported",
        f"{settings_file}: {why}",
        USE_ORIGINAL_HINT,
    )


def find_gptq_scheme(
    schemes: list[GptqScheme],
    weight_name: str,
    weight: Array,
    zeros: Array,
    *,
    has_input_groups: bool,
) -> GptqScheme:
    """Return the settings of a weight: those that its shapes fit, or the model's if none fit.

    Args:
        schemes: The model's settings first.
        weight_name: Name of the weight.
        weight: Words of codes.
        zeros: Words of zero points.
        has_input_groups: Whether the group of each input is stored, so that the size of groups has no effect.

    Raises:
        PrepError: Several fit, and the weight would have other values with each.
    """
    fitting = [scheme for scheme in schemes if scheme.fits(weight, zeros)]
    if not fitting:
        return schemes[0]
    bits = {scheme.bits for scheme in fitting}
    group_sizes = {scheme.group_size for scheme in fitting}
    if len(bits) > 1 or (len(group_sizes) > 1 and not has_input_groups):
        meanings = " or ".join(map(_scheme_text, fitting))
        raise PrepError(
            f"the settings of {quote_name(weight_name)} are unknown",
            f"its tensors fit {meanings}",
            USE_ORIGINAL_HINT,
        )
    return fitting[0]


def _scheme_text(scheme: GptqScheme) -> str:
    if scheme.group_size is None:
        return f"{scheme.bits} bits"
    return f"{scheme.bits} bits in groups of {scheme.group_size}"
