r"""Partition rules as text: the notation of `--rule` and of a recipe's `rules`. Pure.

- `embed=fsdp+sp`: split a logical dim of parameters over mesh axes.
- `kv_heads=mp|none`: the first of several choices that divides the dim.
- `act:seq=sp|none`: split a logical dim of activations.
- `re:^head\.weight$=mp,fsdp`: split the leaves whose paths match, dim by dim.
- `flaxlm:1,1`: a preset, which the other rules change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trainer.models.errors import PrepError, usage_error
from trainer.models.mesh import MeshAxes, check_axis_name, truncate
from trainer.models.rule_presets import AUTO, PRESETS
from trainer.models.rules import (
    ACTIVATION_DIMS,
    ACTIVATION_PREFIX,
    DEFAULT_RULES,
    LEAF_PREFIX,
    PARAM_RULES,
    AxisChoices,
    LeafRule,
    Rules,
    activation_rules,
    format_rule,
)
from trainer.models.suggest import did_you_mean

GRAMMAR = "a rule is DIM=AXIS[+AXIS][|…|none], `act:` before it, re:PATTERN=AXIS,AXIS, or a preset"


@dataclass(frozen=True, slots=True)
class DimRule:
    """A rule of a logical dim.

    Attributes:
        dim: The logical dim.
        choices: Mesh axes to try in order.
        of_activations: Whether the rule is for activations instead of parameters.
    """

    dim: str
    choices: AxisChoices
    of_activations: bool = False

    def __str__(self) -> str:
        return format_rule(self.subject, self.choices)

    @property
    def subject(self) -> str:
        """What the rule is for. At most one rule of a run has each subject."""
        return f"{ACTIVATION_PREFIX * self.of_activations}{self.dim}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of rules."""

    name: str

    def __str__(self) -> str:
        return self.name


Rule = DimRule | LeafRule | Preset


def parse_rule(text: str, *, origin: str = "--rule") -> Rule:
    """Parse a sharding rule. Its text is the rule again.

    Args:
        text: The rule.
        origin: Option or recipe key of the text, for the error.

    Raises:
        UsageError: The text is not a valid rule.
    """
    option = f"`{origin} {truncate(text)}`"
    text = text.strip()
    if text in PRESETS:
        return Preset(text)
    if text.startswith(LEAF_PREFIX):
        return _parse_leaf_rule(text.removeprefix(LEAF_PREFIX), option)
    dim, equals, right = (part.strip() for part in text.partition("="))
    if not equals and ":" in text and not text.startswith(ACTIVATION_PREFIX):
        raise usage_error(f"{option}: unknown preset", f"the presets are {', '.join(PRESETS)}")
    if not equals or not right:
        if origin.startswith("-"):
            example = f"{origin} 'kv_heads=mp|none'"
        else:
            example = f'{origin} = ["kv_heads=mp|none"]'
        raise usage_error(f"{option} is invalid", GRAMMAR, f"`{example}`")
    of_activations = dim.startswith(ACTIVATION_PREFIX)
    rule = DimRule(
        dim.removeprefix(ACTIVATION_PREFIX).strip(), _parse_choices(right, option), of_activations
    )
    _check_dim(rule, option)
    return rule


def _check_dim(rule: DimRule, option: str) -> None:
    """Raise UsageError for an unknown dim, and for a batch that may be split in several ways."""
    dims: Collection[str] = ACTIVATION_DIMS if rule.of_activations else tuple(PARAM_RULES)
    if rule.dim not in dims:
        kind = " of activations" if rule.of_activations else ""
        hint = did_you_mean(rule.dim, dims)
        if not rule.of_activations and rule.dim in ACTIVATION_DIMS:
            hint = f"did you mean `{ACTIVATION_PREFIX}{rule.dim}`?"
        what = f"{option}: unknown dim{kind} `{truncate(rule.dim)}`"
        raise usage_error(what, f"the dims{kind} are {', '.join(dims)}", hint)
    if rule.of_activations and rule.dim == "batch" and len(rule.choices) > 1:
        why = "the number of sequences of a device must not depend on the batch size"
        first_choice = DimRule(rule.dim, rule.choices[:1], of_activations=True)
        raise usage_error(f"{option} has several choices", why, f"`{first_choice}`")


def _parse_choices(text: str, option: str) -> AxisChoices:
    choices = tuple(_parse_choice(part.strip(), option) for part in text.split("|"))
    if () in choices[:-1]:
        why = "none always fits, so later choices are never used"
        raise usage_error(f"{option} has choices after none", why, "put none last")
    return choices


def _parse_choice(text: str, option: str) -> MeshAxes:
    if text == "none":
        return ()
    axes = tuple(axis.strip() for axis in text.split("+"))
    for axis in axes:
        check_axis_name(axis, option)
    if len(set(axes)) < len(axes):
        raise usage_error(
            f"{option} names an axis twice", f"`{truncate(text)}`", "each axis at most once"
        )
    return axes


def _parse_leaf_rule(text: str, option: str) -> LeafRule:
    """Parse PATTERN=CHOICES,CHOICES. The pattern ends at the last `=`."""
    pattern, equals, right = text.rpartition("=")
    if not equals or not pattern or not right.strip():
        why = "a rule of leaves is re:PATTERN=CHOICES,CHOICES, with one entry per dim"
        raise usage_error(f"{option} is invalid", why, r"`re:^head\.weight$=mp,fsdp`")
    try:
        re.compile(pattern)
    # `re.compile` raises OverflowError for a huge number of repeats, e.g. `a{99999999999}`, and
    # RecursionError for many nested groups.
    except (re.error, OverflowError, RecursionError) as error:
        hint = r"a regular expression, such as `^head\.weight$`"
        raise usage_error(f"{option} has an invalid pattern", str(error), hint) from error
    choices = tuple(_parse_choices(part.strip(), option) for part in right.split(","))
    # Axes of a dim with several choices are not certain: the mesh decides between them.
    certain_axes: list[str] = []
    for dim_choices in choices:
        if len(dim_choices) == 1:
            certain_axes += dim_choices[0]
    if twice := next((axis for axis in certain_axes if certain_axes.count(axis) > 1), None):
        why = "a mesh axis splits one dim of a leaf"
        hint = "`none` for one of the dims"
        raise usage_error(f"{option} splits two dims over {twice}", why, hint)
    return LeafRule(pattern, choices)


def merge_rules(texts: Iterable[str], *, origin: str = "--rule") -> Rules:
    """Return a preset, or else the default rules, with other rules in place of those for the same dims.

    Args:
        texts: Rules in the notation of `parse_rule`.
        origin: Option or recipe key of the texts, for the error.

    Raises:
        UsageError: A rule is invalid, or two rules contradict each other.
    """
    rules = [parse_rule(text, origin=origin) for text in texts]
    _check_unique(rules)
    base = next((PRESETS[rule.name] for rule in rules if isinstance(rule, Preset)), DEFAULT_RULES)
    dim_rules = [rule for rule in rules if isinstance(rule, DimRule)]
    params = {rule.dim: rule.choices for rule in dim_rules if not rule.of_activations}
    if base.by_size and params:
        why = f"{AUTO} splits parameters by size, not by the names of their dims"
        what = f"`{format_rule(*next(iter(params.items())))}` has no effect with `{AUTO}`"
        raise usage_error(
            what, why, "`re:PATTERN=…` for single leaves, `act:DIM=…` for activations"
        )
    return Rules(
        params={**base.params, **params},
        activations={
            **base.activations,
            **{rule.dim: rule.choices for rule in dim_rules if rule.of_activations},
        },
        leaves=tuple(rule for rule in rules if isinstance(rule, LeafRule)),
        by_size=base.by_size,
    )


def with_default_preset(texts: Iterable[str]) -> tuple[str, ...]:
    """Return rules with the preset AUTO before them, unless they have a preset.

    >>> with_default_preset(["re:gate=none"])
    ('auto', 're:gate=none')
    """
    rules = tuple(texts)
    if any(rule.strip() in PRESETS for rule in rules):
        return rules
    return (AUTO, *rules)


def _check_unique(rules: Iterable[Rule]) -> None:
    """Raise UsageError for two rules of the same dim or pattern, and for two presets."""
    rules_by_subject: dict[str, Rule] = {}
    for rule in rules:
        subject = _subject(rule)
        if subject in rules_by_subject:
            raise _duplicate_error(subject, rules_by_subject[subject], rule)
        rules_by_subject[subject] = rule


def _subject(rule: Rule) -> str:
    match rule:
        case DimRule():
            return rule.subject
        case LeafRule():
            return f"{LEAF_PREFIX}{rule.pattern}"
        case Preset():
            return ""


def _duplicate_error(subject: str, first: Rule, second: Rule) -> PrepError:
    both = f"`{first}` and `{second}`"
    if not subject:
        return usage_error(
            "two presets", both, "a preset, and rules that change it: `flaxlm:1,1`, `heads=none`"
        )
    return usage_error(
        f"two rules for {subject}", both, f"join the choices of a rule by |: `{subject}=mp|none`"
    )


def rule_texts(rules: Rules, dims: Collection[str]) -> list[str]:
    """Return all rules that concern a model, as text.

    Args:
        rules: Partition rules.
        dims: Logical dims of the model's parameters.
    """
    if rules.by_size:
        param_rules = [AUTO]
    else:
        param_rules = [
            format_rule(dim, choices) for dim, choices in rules.params.items() if dim in dims
        ]
    # A rule that the rules of parameters imply is not written again.
    defaults = activation_rules(Rules(rules.params))
    changed = {
        dim: choices for dim, choices in rules.activations.items() if choices != defaults[dim]
    }
    activation_texts = [
        str(DimRule(dim, choices, of_activations=True)) for dim, choices in changed.items()
    ]
    return [*map(str, rules.leaves), *param_rules, *activation_texts]
