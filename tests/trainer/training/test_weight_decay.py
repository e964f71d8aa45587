"""Leaves with weight decay: the same as in transformers' Trainer, and included relative position biases."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.models.param_tree import flatten_tree
from tests.helpers.hybrid_configs import HYBRID_FAMILIES
from tests.helpers.later_configs import GEMMA4_EXPERTS, LATER_FAMILIES
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, GPT_NEO, LLAMA
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.training.optimizers import decay_mask

# Families with parameters that others do not have.
LATER = {
    "apertus": LATER_FAMILIES["apertus"],
    "gemma4_text": LATER_FAMILIES["gemma4_text"] | GEMMA4_EXPERTS,
    **{name: LATER_FAMILIES[name] for name in ("diffllama", "doge", "gpt_neox_japanese")},
}
CONFIGS = {"llama": LLAMA, "gpt_neo": GPT_NEO, **FAMILY_CONFIGS, **HYBRID_FAMILIES, **LATER}
# The Trainer finds norms by their names, and misses this one.
UNRECOGNIZED_NORMS = {"backbone.norm_f.weight", "model.norm_f.weight"}
# Prefix in files -> prefix in the model, where transformers renames tensors.
RENAMED = {"nemotron_h": ("backbone.", "model.")}
BIASES = {"encoder.relative_positions.weight", "decoder.relative_positions.weight"}


def decayed(config: dict, **keys: Any) -> set[str]:
    """Return the paths of the leaves with weight decay."""
    table = AdamWTable(lr=1.0, weight_decay=0.1, **keys)
    mask = flatten_tree(decay_mask(table, tiny_transformer(config).model.leaves))
    return {path for path, decays in mask.items() if decays}


@pytest.mark.parametrize("family", CONFIGS)
def test_decayed_leaves_match_the_transformers_trainer(family: str):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = CONFIGS[family]
    with torch.device("meta"):
        hf_config = transformers.AutoConfig.for_model(**config)
        auto = (
            transformers.AutoModelForSeq2SeqLM
            if family == "t5"
            else transformers.AutoModelForCausalLM
        )
        model = auto.from_config(hf_config)
    trainer_names = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    trainer_names -= UNRECOGNIZED_NORMS
    names = {name for name, _ in model.named_parameters()}
    leaves = decayed(config)
    old, new = RENAMED.get(family, ("", ""))
    leaf_paths = {
        location.tensor.replace(old, new, 1): location.leaf_path
        for location in tiny_transformer(config).locations
    }
    compared = leaf_paths.keys() & names
    assert len(compared) > len(names) / 2, "the names of tensors differ"
    wrong = {x for x in compared if (leaf_paths[x] in leaves) != (x in trainer_names)}
    assert wrong == set()


def test_relative_position_biases_decay_if_included():
    config = FAMILY_CONFIGS["t5"]
    assert not BIASES & decayed(config)
    assert decayed(config, decay_include=("re:relative_positions",)) >= BIASES
