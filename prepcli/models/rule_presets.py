"""Named sets of partition rules: the partitioning dims of flaxlm and t5x, and rules by size. Pure.

flaxlm and t5x name a pair of numbers: the dims of activations and the dims of parameters that are
split. Their mesh axis `model` is mp. Their axis `data` is dp and fsdp for the batch, and fsdp for
parameters, which dp never splits.
Sources: andyehrenberg/flaxlm, flaxlm/src/partitioning_utils.py. Google-research/t5x,
t5x/partitioning.py.
"""

from __future__ import annotations

from prepcli.models.rules import PARAM_RULES, WHOLE, AxisChoices, Rules, unsplit_if_indivisible

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


def _size_rules() -> Rules:
    """Return rules by size. The computation splits dims as by default where the mesh divides them."""
    return Rules(unsplit_if_indivisible(PARAM_RULES), by_size=True)


PRESETS: dict[str, Rules] = {
    AUTO: _size_rules(),
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
