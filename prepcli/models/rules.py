r"""Partition rules: the mesh axes that split the dims of parameters and activations, and their text. Pure.

The notation of `--rule` and of a recipe's `rules`:

- `embed=fsdp+sp`: split a logical dim of parameters over mesh axes.
- `kv_heads=mp|none`: the first of several choices that divides the dim.
- `act:seq=sp|none`: split a logical dim of activations.
- `re:^head\.weight$=mp,fsdp`: split the leaves whose paths match, dim by dim.
- `flaxlm:1,1`: a preset, which the other rules change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from prepcli.algebra.axis_map import LAYER_ATOMS, dim_name, stack_axis
from prepcli.core.errors import Command, Key, Option, PrepError, Text, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.mesh import MeshAxes, check_axis_name, truncate

# Mesh axes to try in order. () keeps the dim whole.
AxisChoices = tuple[MeshAxes, ...]
# Logical dim -> choices. If two dims of a leaf choose the same mesh axis, the dim with the earlier rule gets it.
DimRules = Mapping[str, AxisChoices]
# The atoms of each dim of a leaf. `dim_name` gives the logical name of a dim.
LeafDims = Sequence[tuple[str, ...]]
WHOLE: AxisChoices = ((),)
# Choices of a leaf's rule.
KEEP_LEAF_WHOLE = (WHOLE,)

# The usual sharding of LLaMA: heads, mlp and vocab over mp, the other dim of each matrix over fsdp. Two decisions:
# - k and v are not split if their heads do not divide mp. Models with grouped-query attention have 8 or fewer, padding
#   of heads is not exact in general, and k and v are about 2 % of the parameters.
# - experts are not split, mp splits each expert: every routing then loads all devices equally, without all-to-all.
PARAM_RULES: DimRules = {
    "vocab": (("mp",),),
    "experts": WHOLE,
    "heads": (("mp",),),
    "kv_heads": (("mp",), ()),
    # Key and value heads of layers with full attention, if they differ from those of other layers.
    "full_kv_heads": (("mp",), ()),
    # Heads of a recurrent mixer: groups of heads that share queries and keys, and the heads of a group.
    "mixer_groups": (("mp",), ()),
    "group_heads": (("mp",), ()),
    "mixer_channels": (("mp",), ()),
    "mlp": (("mp",),),
    "dense_mlp": (("mp",),),
    "shared_mlp": (("mp",),),
    "expert_mlp": (("mp",),),
    "wide_mlp": (("mp",),),
    # Embeddings of a token for each layer.
    "layer_vocab": (("mp",), ()),
    "layer_input": (("fsdp",), ()),
    "embed": (("fsdp",),),
    # The width of embeddings that are narrower than the layers. It is not split in a leaf with
    # `embed`.
    "word_embed": (("fsdp",), ()),
    # Each step of a scan would gather a split stack.
    **dict.fromkeys(
        (
            "layers", "encoder_layers", "dense_layers", "sparse_layers", "attention_layers", "mixer_layers",
            "sliding_layers", "full_layers", "reusing_sliding_layers", "reusing_full_layers", "narrow_layers",
            "wide_layers", "biased_layers", "unbiased_layers", "input_layers",
        ),
        WHOLE,
    ),
    # Heads with scores of their keys, beside all heads with values.
    "score_heads": WHOLE,
    **dict.fromkeys(
        (
            "head_dim", "full_head_dim", "value_dim", "kv_dim", "rope_dim", "q_rank", "kv_rank", "positions",
            "buckets", "norm", "mixer_state", "dt_rank", "mixer_head_dim", "mixer_fused", "kernel",
        ),
        WHOLE,
    ),
}  # fmt: skip

# Mesh axes of activations by logical dim. sp splits the tokens of a row everywhere; attention passes keys and values
# from device to device. The residual stream between layers is split over mp along tokens as well, where attention and
# MLP are split along heads and hidden units: at long contexts most memory holds saved layer inputs.
ACTIVATION_RULES: DimRules = {
    "batch": (("dp", "fsdp"),),
    "residual_seq": (("sp", "mp"), ("sp",)),
    "seq": (("sp",),),
    "embed": WHOLE,
}
# Dims of activations that a rule can name. A dim without an entry in ACTIVATION_RULES has the rule
# of parameters by default.
ACTIVATION_DIMS = (*ACTIVATION_RULES, "heads", "kv_heads", "head_dim", "mlp", "vocab")

# Logical dim of the experts of a verbatim leaf. No computation depends on their sharding.
VERBATIM_EXPERTS = "verbatim_experts"
EXPERT_DIMS = ("experts", VERBATIM_EXPERTS)
# Logical dims that count layers or experts: a leaf has one source tensor per index.
STACKED_DIMS = (*LAYER_ATOMS, *EXPERT_DIMS)

# Prefixes of rules of leaves and of activations, as text.
LEAF_PREFIX = "re:"
ACTIVATION_PREFIX = "act:"


@dataclass(frozen=True, slots=True)
class LeafRule:
    """A rule of the leaves whose paths match a pattern.

    Paths have no layer numbers, and the dim of stacked layers has no entry. A rule therefore does
    not depend on whether layers are stacked, or on which axis.
    """

    pattern: str  # Regular expression that is searched in a path.
    # Choices of each dim except stacked layers. KEEP_LEAF_WHOLE for leaves of any number of dims.
    choices: tuple[AxisChoices, ...]

    def __str__(self) -> str:
        return f"{self.subject}={','.join(map(format_choices, self.choices))}"

    @property
    def subject(self) -> str:
        """The left side of the rule. Two rules of a run have different subjects."""
        return f"{LEAF_PREFIX}{self.pattern}"

    def matches(self, path: str) -> bool:
        """Return whether the rule matches the dotted path of a leaf."""
        return re.search(self.pattern, path_without_layers(path)) is not None

    def choices_of_leaf(self, path: str, dims: LeafDims) -> list[AxisChoices]:
        """Return the choices of each dim of a leaf, which is not split along stacked layers.

        Raises:
            UsageError: The rule is for another number of dims.
        """
        if self.choices == KEEP_LEAF_WHOLE:
            return [WHOLE] * len(dims)
        layers = stack_axis(dims)
        names = [dim_name(dim) for i, dim in enumerate(dims) if i != layers]
        if len(names) != len(self.choices):
            raise self._dims_error(path, names)
        choices = list(self.choices)
        if layers is None:
            return choices
        return [*choices[:layers], WHOLE, *choices[layers:]]

    def _dims_error(self, path: str, names: Sequence[str]) -> PrepError:
        leaf = path_without_layers(path)
        given = len(self.choices)
        what = f"`{truncate(str(self))}` has {given} dim{'s' if given > 1 else ''}, and {leaf} has {len(names)}"
        hint = "write one entry per dim, or only `none` to keep leaves whole, or put a rule for this leaf first"
        return usage_error(what, f"the dims of {leaf} are {', '.join(names)}", hint)


@dataclass(frozen=True, slots=True)
class Rules:
    """The partition rules of a run."""

    # Choices of each logical dim of parameters.
    params: DimRules = field(default_factory=lambda: PARAM_RULES)
    # Choices of dims of activations that differ from ACTIVATION_RULES and from `params`.
    activations: DimRules = field(default_factory=dict[str, AxisChoices])
    # Rules of single leaves, in place of `params`. The first that matches is used.
    leaves: tuple[LeafRule, ...] = ()
    # Whether stored parameters are split along their largest dims, whatever the names of the dims. `params` then
    # applies only to the copies that the model computes with.
    by_size: bool = False


DEFAULT_RULES = Rules(PARAM_RULES)


def path_without_layers(path: str) -> str:
    """Return a dotted path without layer numbers, their placeholders, and the `*` of stacked numbers."""
    kept = [part for part in path.split(".") if not part.isdecimal() and part != "*"]
    return ".".join(part for part in kept if not part.startswith("{"))


def find_leaf_rule(rules: Rules, path: str) -> LeafRule | None:
    """Return the first rule that matches the path of a leaf, or None."""
    return next((rule for rule in rules.leaves if rule.matches(path)), None)


def check_leaf_rules(rules: Rules, leaves: Mapping[str, LeafDims]) -> None:
    """Check that each leaf rule matches a leaf, and lists as many dims as its leaves have.

    `leaves` has the dims of each parameter by dotted path.

    Raises:
        UsageError: A rule is not used, or is for another number of dims.
    """
    rules_by_path = {path: find_leaf_rule(rules, path) for path in leaves} if rules.leaves else {}
    for path, rule in rules_by_path.items():
        if rule:
            rule.choices_of_leaf(path, leaves[path])
    for rule in rules.leaves:
        if rule not in rules_by_path.values():
            raise _unused_rule_error(rule, rules_by_path)


def _unused_rule_error(rule: LeafRule, rules_by_path: Mapping[str, LeafRule | None]) -> PrepError:
    earlier_rules = [earlier for path, earlier in rules_by_path.items() if rule.matches(path)]
    if earlier_rules:
        why = f"an earlier rule has the same leaves: `{earlier_rules[0]}`"
        return usage_error(
            f"`{truncate(str(rule))}` is never used", why, "put the narrower pattern first"
        )
    paths = list(dict.fromkeys(map(path_without_layers, rules_by_path)))
    # The pattern without the signs of regular expressions resembles the path that was meant.
    name = re.sub(r"\\[AbBdDsSwWZ]|[\\^$]", "", rule.pattern)
    hint = did_you_mean(name, paths) or text(
        "{} lists the leaves", Command("inspect", "CHECKPOINT")
    )
    return usage_error(
        f"`{truncate(str(rule))}` matches no leaf", f"the first leaf is {paths[0]}", hint
    )


def activation_rules(rules: Rules) -> DimRules:
    """Return the rules of activations. The batch comes first, so that other dims never take its mesh axes."""
    shared_dims = {
        dim: choices for dim, choices in rules.params.items() if dim not in ACTIVATION_RULES
    }
    return {**ACTIVATION_RULES, **shared_dims, **rules.activations}


def unsplit_if_indivisible(rules: DimRules) -> DimRules:
    """Return rules that leave a dim unsplit if the mesh axes of no other choice divide it."""
    return {dim: choices if choices[-1] == () else (*choices, ()) for dim, choices in rules.items()}


def format_rule(dim: str, choices: AxisChoices) -> str:
    """Return a rule of a dim in the notation of `--rule`."""
    return f"{dim}={format_choices(choices)}"


def format_choices(choices: AxisChoices) -> str:
    """Return the choices of a dim as text, such as `fsdp+mp|none`."""
    return "|".join("+".join(axes) or "none" for axes in choices)


# Named sets of rules: the partitioning dims of flaxlm and t5x, and rules by size
#
# flaxlm and t5x name a pair of numbers: the dims of activations and the dims of parameters that are split. Their mesh
# axis `model` is mp. Their axis `data` is dp and fsdp for the batch, and fsdp for parameters, which dp never splits.
# Sources: andyehrenberg/flaxlm, flaxlm/src/partitioning_utils.py. Google-research/t5x, t5x/partitioning.py.

AUTO = "auto"
_MODEL: AxisChoices = (("mp",),)
_MODEL_OR_WHOLE: AxisChoices = (("mp",), ())
_TENSOR_DIMS = ("vocab", "heads", "kv_heads", "mlp")
# (split dims of activations, split dims of parameters) -> choices of mesh axes for the dim `embed` of parameters.
# `embed` is split only if one of the two numbers is 2.
_EMBED_CHOICES: dict[tuple[int, int], AxisChoices] = {
    (1, 1): WHOLE,
    (2, 1): _MODEL,
    (1, 2): (("fsdp",),),
    (2, 2): (("mp",), ("fsdp",)),
}


def _partitioning_rules(
    activation_dims: int, param_dims: int, *, splits_heads: bool = True
) -> Rules:
    """Return the rules of a pair of partitioning dims. `splits_heads` is about activations."""
    embed = _EMBED_CHOICES.get((activation_dims, param_dims), WHOLE)
    tensor_choices = _MODEL if param_dims else WHOLE
    params = {
        **PARAM_RULES,
        **dict.fromkeys(_TENSOR_DIMS, tensor_choices),
        "kv_heads": _MODEL_OR_WHOLE if param_dims else WHOLE,
        "embed": embed,
        "word_embed": embed if embed[-1] == () else (*embed, ()),
    }
    activations = {
        **({} if activation_dims else {"batch": WHOLE}),
        "residual_seq": (("sp",), ()),
        **({"embed": _MODEL} if activation_dims == 2 else {}),
        **({} if splits_heads else dict.fromkeys(("heads", "kv_heads"), WHOLE)),
    }
    return Rules(params, activations)


PRESETS: dict[str, Rules] = {
    # The computation splits dims as by default where the mesh divides them.
    AUTO: Rules(unsplit_if_indivisible(PARAM_RULES), by_size=True),
    "flaxlm:0,0": _partitioning_rules(0, 0),
    "flaxlm:1,0": _partitioning_rules(1, 0),
    "flaxlm:1,1": _partitioning_rules(1, 1, splits_heads=False),
    **{
        f"{system}:{activation_dims},{param_dims}": _partitioning_rules(activation_dims, param_dims)
        for system, pairs in (
            ("flaxlm", ((2, 1), (1, 2), (2, 2))),
            ("t5x", ((1, 1), (2, 1), (1, 2), (2, 2))),
        )
        for activation_dims, param_dims in pairs
    },
}


# Rules as text

RULES_OPTION = Option("rules")
GRAMMAR = "a rule is DIM=AXIS[+AXIS][|…|none], `act:` before it, re:PATTERN=AXIS,AXIS, or a preset"


@dataclass(frozen=True, slots=True)
class DimRule:
    """A rule of a logical dim."""

    dim: str  # The logical dim.
    choices: AxisChoices  # Mesh axes to try in order.
    of_activations: bool = False  # Whether the rule is for activations instead of parameters.

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
    subject: ClassVar[str] = ""  # All presets have the same one.

    def __str__(self) -> str:
        return self.name


Rule = DimRule | LeafRule | Preset


def parse_rule(rule_text: str, *, origin: Option | Key = RULES_OPTION) -> Rule:
    """Parse a sharding rule. `str` of the result is a text of the same rule.

    `origin` is the option or recipe key of the text, for the error.

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

    `origin` is the option or recipe key of the texts, for the error.

    Raises:
        UsageError: A rule is invalid, or two rules contradict each other.
    """
    rules = [parse_rule(rule_text, origin=origin) for rule_text in texts]
    rules_by_subject: dict[str, Rule] = {}
    for rule in rules:
        if rule.subject in rules_by_subject:
            raise _duplicate_error(rule.subject, rules_by_subject[rule.subject], rule)
        rules_by_subject[rule.subject] = rule
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

    `dims` are the logical dims of the model's parameters.
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
