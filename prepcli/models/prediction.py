"""Multi-token prediction: the tensors of a file that predict further tokens, and the fields that state their number.

A model runs without them. They are stored beside it under one of two kinds of names:

    layers.61.eh_proj.weight    a layer after the last one (DeepSeek-V3, GLM-4.5)
    mtp.fc.weight               a module (`mtp` in Qwen3-Next, `mtp_block` in ERNIE 4.5, `mtp_layers` in MiMo)

No I/O, no jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.parameters import MAX_LAYERS, Family, read_count

# Number of layers after the last one. transformers 5 reads the second name too.
LAYER_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
# Fields with a number of layers or modules. 0 states that the files have none. The others are those of Qwen3.5 and
# MiniMax-M2.
PREDICTION_FIELDS = (*LAYER_FIELDS, "mtp_num_hidden_layers", "num_mtp_modules")
# Rules under which versions of prep up to 0.1.0 recorded the tensors that they dropped. They kept the fields. Only the
# command that dropped them recorded it, so that an export of its output has no record.
UNRECORDED_RULE = (
    "multi-token prediction, which an earlier version of prep left out without a record"
)
EARLIER_RULES = frozenset(
    {
        "layer of multi-token prediction, which the model does not run",
        "module of multi-token prediction, which the model does not run",
        UNRECORDED_RULE,
    }
)
_MODULE = re.compile(r"mtp(_\w+)?\.")
# An embedding or a head of its own: `layers.61.embed_tokens.weight` and `layers.61.shared_head.head.weight` of
# DeepSeek-V3 and GLM-4.5, `layers.45.transformer.shared_head.output.weight` of Step-3.5, `mtp.embed_tokens.weight` of
# LongCat. A quantised one has further parameters, e.g. `shared_head.head.qweight`.
_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head|shared_head\.(head|output))\.\w+")
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")


def prediction_names(family: Family, config: HFConfig, names: Iterable[str]) -> set[str]:
    """Return the names that belong to multi-token prediction.

    Args:
        family: Family of the model. Not the verbatim one.
        config: Content of its config.json, or the config of its text part.
        names: Names of tensors, without the family's prefix.

    Raises:
        PrepError: The config has an invalid number of layers.
    """
    count = family.default_prediction_layers
    for field in LAYER_FIELDS:
        if config.get(field) is not None:
            count = read_count(config, field, count, MAX_LAYERS)
            break
    first = family.sizes(config)[LAYERS]
    layers = range(first, first + count)
    selected: set[str] = set()
    for name in names:
        layer = _LAYER.match(name)
        if _MODULE.match(name) or (layer and int(layer[1]) in layers):
            selected.add(name)
    return selected


def is_prediction_vocabulary(name: str) -> bool:
    """Return whether a tensor of multi-token prediction belongs to an embedding or a head.

    >>> is_prediction_vocabulary("layers.61.shared_head.head.weight")
    True
    >>> is_prediction_vocabulary("layers.61.shared_head.norm.weight")
    False
    """
    return _VOCABULARY.fullmatch(name) is not None


def without_prediction(config: HFConfig) -> JsonObject:
    """Return the config of a model without its multi-token prediction.

    >>> without_prediction({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
    {'num_hidden_layers': 61, 'num_nextn_predict_layers': 0}
    """
    return {
        key: 0 if key in PREDICTION_FIELDS and value else value for key, value in config.items()
    }
