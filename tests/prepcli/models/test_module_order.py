"""The order of parameters in torch optimizers equals the order of transformers' own models and Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.module_order import expand_braces, module_order, optimizer_groups
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT2, GPT_NEO, LLAMA
from tools.module_order import join_siblings

torch = lazy_module("torch")
transformers = lazy_module("transformers")

CONFIGS = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "llama": LLAMA}
CONFIGS |= {name: FAMILY_CONFIGS[name] for name in ("qwen2", "qwen3", "gemma2", "phi3")}


def torch_model(config: dict[str, Any]) -> Any:
    from prepcli.commands.testing.tiny_model import torch_random_model

    return torch_random_model(config)


@pytest.mark.parametrize("family", CONFIGS)
def test_order_and_groups_equal_those_of_trainer(family: str, tmp_path):
    config = CONFIGS[family]
    if family != "gpt_neo":
        # Layer 10 comes after layer 9, and before it in the order of texts.
        config = config | {"num_hidden_layers": 11}
    model = torch_model(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, weight_decay=0.1, report_to=[]
    )
    decayed, not_decayed = transformers.Trainer(model, args).create_optimizer().param_groups
    groups = optimizer_groups(family, sorted(names.values()))
    assert groups.decayed == tuple(names[id(p)] for p in decayed["params"])
    assert groups.not_decayed == tuple(names[id(p)] for p in not_decayed["params"])
    assert module_order(family, sorted(names.values())) == tuple(names.values())


def test_unknown_parameter_and_family_are_refused():
    with pytest.raises(
        PrepError, match=r"the place of model\.new\.weight in the optimizer of llama"
    ):
        module_order("llama", ["model.new.weight"])
    with pytest.raises(PrepError, match="the optimizer state of mixtral is not supported"):
        optimizer_groups("mixtral", ["model.norm.weight"])
    with pytest.raises(PrepError, match="the optimizer state of mixtral is not supported"):
        module_order("mixtral", ["model.norm.weight"])


def test_joined_siblings_expand_to_the_same_order():
    # The bias of the last module, a parameter without a module, and siblings that are not adjacent
    layer = ["h.*.a.q.weight", "h.*.a.q.bias", "h.*.a.k.weight", "h.*.a.k.bias", "h.*.a.o.bias"]
    order = ["embed", *layer, "h.*.sinks", "h.*.norm.weight", "norm.weight", "h.*.a.v.weight"]
    lines = [*join_siblings(order)]
    assert lines[1] == "h.*.a.{q,k}.{weight,bias}"
    assert [name for line in lines for name in expand_braces(line)] == order
