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
from dataclasses import dataclass, replace

from prepcli.core.errors import Key, Option, PrepError, Text, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.mesh import MeshAxes, check_axis_name, truncate
from prepcli.models.rules import (
    ACTIVATION_DIMS,
    ACTIVATION_PREFIX,
    AUTO,
    DEFAULT_RULES,
    LEAF_PREFIX,
    PARAM_RULES,
    PRESETS,
    AxisChoices,
    LeafRule,
    Rules,
    activation_rules,
    format_rule,
)

RULES_OPTION = Option("rules")
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
        """The dim with its prefix for activations, e.g. `act:batch`. Two rules of a run have different subjects."""
        return f"{ACTIVATION_PREFIX * self.of_activations}{self.dim}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of rules."""

    name: str

    def __str__(self) -> str:
        return self.name


Rule = DimRule | LeafRule | Preset


def parse_rule(rule_text: str, *, origin: Option | Key = RULES_OPTION) -> Rule:
    """Parse a sharding rule. `str` of the result is a text of the same rule.

    Args:
        rule_text: The rule.
        origin: Option or recipe key of the text, for the error.

    Raises:
        UsageError: The text is not a valid rule.
    """
    option = _rule_reference(origin, truncate(rule_text))
    rule_text = rule_text.strip()
    if rule_text in PRESETS:
        return Preset(rule_text)
    if rule_text.startswith(LEAF_PREFIX):
        return _parse_leaf_rule(rule_text.removeprefix(LEAF_PREFIX), option)
    dim, equals, right = (part.strip() for part in rule_text.partition("="))
    if not equals and ":" in rule_text and not rule_text.startswith(ACTIVATION_PREFIX):
        why = f"the presets are {', '.join(PRESETS)}"
        hint = did_you_mean(rule_text, PRESETS)
        raise usage_error(text("{}: unknown preset", option), why, hint)
    if not equals or not right:
        hint = _rule_reference(origin, "kv_heads=mp|none")
        raise usage_error(text("{} is invalid", option), GRAMMAR, hint)
    of_activations = dim.startswith(ACTIVATION_PREFIX)
    rule = DimRule(
        dim.removeprefix(ACTIVATION_PREFIX).strip(), _parse_choices(right, option), of_activations
    )
    _check_dim(rule, option)
    return rule


def _rule_reference(origin: Option | Key, rule_text: str) -> Text:
    """Return the option or the recipe key with one rule. The key takes a list of rules."""
    value = [rule_text] if isinstance(origin, Key) else rule_text
    return text("{}", replace(origin, value=value))


def _check_dim(rule: DimRule, option: Text) -> None:
    """Raise UsageError for an unknown dim, and for a batch that may be split in several ways."""
    dims: Collection[str] = ACTIVATION_DIMS if rule.of_activations else tuple(PARAM_RULES)
    if rule.dim not in dims:
        kind = " of activations" if rule.of_activations else ""
        hint = did_you_mean(rule.dim, dims)
        if not rule.of_activations and rule.dim in ACTIVATION_DIMS:
            hint = f"did you mean `{ACTIVATION_PREFIX}{rule.dim}`?"
        what = text("{}: unknown dim{} `{}`", option, kind, truncate(rule.dim))
        raise usage_error(what, f"the dims{kind} are {', '.join(dims)}", hint)
    if rule.of_activations and rule.dim == "batch" and len(rule.choices) > 1:
        why = "the number of sequences of a device must not depend on the batch size"
        first_choice = DimRule(rule.dim, rule.choices[:1], of_activations=True)
        raise usage_error(text("{} has several choices", option), why, f"`{first_choice}`")


def _parse_choices(choices_text: str, option: Text) -> AxisChoices:
    """Parse the choices of a rule, e.g. `mp|none`."""
    choices = tuple(_parse_choice(part.strip(), option) for part in choices_text.split("|"))
    if () in choices[:-1]:
        why = "`none` always fits, so later choices are never used"
        raise usage_error(text("{} has choices after `none`", option), why, "put `none` last")
    return choices


def _parse_choice(choice_text: str, option: Text) -> MeshAxes:
    """Parse one choice: mesh axes such as `fsdp+mp`, or `none`."""
    if choice_text == "none":
        return ()
    axes = tuple(axis.strip() for axis in choice_text.split("+"))
    for axis in axes:
        check_axis_name(axis, option)
    if len(set(axes)) < len(axes):
        what = text("{} names an axis twice", option)
        raise usage_error(what, f"`{truncate(choice_text)}`", "name each axis at most once")
    return axes


def _parse_leaf_rule(rule_text: str, option: Text) -> LeafRule:
    """Parse PATTERN=CHOICES,CHOICES. The pattern ends at the last `=`."""
    pattern, equals, right = rule_text.rpartition("=")
    if not equals or not pattern or not right.strip():
        why = "a rule of leaves is re:PATTERN=CHOICES,CHOICES, with one entry per dim"
        raise usage_error(text("{} is invalid", option), why, r"`re:^head\.weight$=mp,fsdp`")
    try:
        re.compile(pattern)
    # `re.compile` raises OverflowError for a huge number of repeats, e.g. `a{99999999999}`, and
    # RecursionError for many nested groups.
    except (re.error, OverflowError, RecursionError) as error:
        hint = r"a regular expression, such as `^head\.weight$`"
        what = text("{} has an invalid pattern", option)
        raise usage_error(what, str(error), hint) from error
    choices = tuple(_parse_choices(part.strip(), option) for part in right.split(","))
    # Axes of a dim with several choices are not certain: the mesh decides between them.
    certain_axes: list[str] = []
    for dim_choices in choices:
        if len(dim_choices) == 1:
            certain_axes += dim_choices[0]
    if twice := next((axis for axis in certain_axes if certain_axes.count(axis) > 1), None):
        why = "a mesh axis splits one dim of a leaf"
        hint = "`none` for one of the dims"
        raise usage_error(text("{} splits two dims over {}", option, twice), why, hint)
    return LeafRule(pattern, choices)


def merge_rules(texts: Iterable[str], *, origin: Option | Key = RULES_OPTION) -> Rules:
    """Return the rules of a preset or the default rules, overridden by the other rules for the same dims.

    Args:
        texts: Rules in the notation of `parse_rule`.
        origin: Option or recipe key of the texts, for the error.

    Raises:
        UsageError: A rule is invalid, or two rules contradict each other.
    """
    rules = [parse_rule(rule_text, origin=origin) for rule_text in texts]
    rules_by_subject: dict[str, Rule] = {}
    for rule in rules:
        subject = _rule_subject(rule)
        if subject in rules_by_subject:
            raise _duplicate_error(subject, rules_by_subject[subject], rule)
        rules_by_subject[subject] = rule
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


def _rule_subject(rule: Rule) -> str:
    """Return the left side of a rule. Two rules may not have the same one."""
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
            "two presets",
            both,
            "use one preset, and rules that change it: `flaxlm:1,1`, `heads=none`",
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
