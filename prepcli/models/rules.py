"""Partition rules: the mesh axes that split the dims of parameters and activations. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prepcli.algebra.axis_map import LAYER_ATOMS, dim_name, stack_axis
from prepcli.core.errors import Command, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.mesh import MeshAxes, truncate

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
    "layers": WHOLE,  # each step of a scan would gather a split stack
    "encoder_layers": WHOLE,
    "dense_layers": WHOLE,
    "sparse_layers": WHOLE,
    "attention_layers": WHOLE,
    "mixer_layers": WHOLE,
    "sliding_layers": WHOLE,
    "full_layers": WHOLE,
    "reusing_sliding_layers": WHOLE,
    "reusing_full_layers": WHOLE,
    "narrow_layers": WHOLE,
    "wide_layers": WHOLE,
    "biased_layers": WHOLE,
    "unbiased_layers": WHOLE,
    "input_layers": WHOLE,
    # Heads with scores of their keys, beside all heads with values.
    "score_heads": WHOLE,
    "head_dim": WHOLE,
    "full_head_dim": WHOLE,
    "value_dim": WHOLE,
    "kv_dim": WHOLE,
    "rope_dim": WHOLE,
    "q_rank": WHOLE,
    "kv_rank": WHOLE,
    "positions": WHOLE,
    "buckets": WHOLE,
    "norm": WHOLE,
    "mixer_state": WHOLE,
    "dt_rank": WHOLE,
    "mixer_head_dim": WHOLE,
    "mixer_fused": WHOLE,
    "kernel": WHOLE,
}


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

    Attributes:
        pattern: Regular expression that is searched in a path.
        choices: Choices of each dim except stacked layers. KEEP_LEAF_WHOLE for leaves of any number
            of dims.
    """

    pattern: str
    choices: tuple[AxisChoices, ...]

    def __str__(self) -> str:
        return f"{LEAF_PREFIX}{self.pattern}={','.join(map(format_choices, self.choices))}"

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
    """The partition rules of a run.

    Attributes:
        params: Choices of each logical dim of parameters.
        activations: Choices of dims of activations that differ from ACTIVATION_RULES and from
            `params`.
        leaves: Rules of single leaves, in place of `params`. The first that matches is used.
        by_size: Whether stored parameters are split along their largest dims, whatever the names of the
            dims. `params` then applies only to the copies that the model computes with.
    """

    params: DimRules = field(default_factory=lambda: PARAM_RULES)
    activations: DimRules = field(default_factory=dict[str, AxisChoices])
    leaves: tuple[LeafRule, ...] = ()
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

    Args:
        rules: Partition rules.
        leaves: Dims of each parameter, by dotted path.

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
