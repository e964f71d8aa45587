"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from trainer import llama_like
from trainer.layouts import EASYLM, hf_flax
from trainer.llama_like import PREFIX
from trainer.table import Config
from trainer.traits import ROPE, Traits, only_knows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; LlamaConfig's defaults where a field is absent."""
    found = llama_like.sizes(config)
    # dims of a head that are turned together: HF has them `half` apart, EasyLM side by side
    return {**found, "two": 2, "half": found["head_dim"] // 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias", "mlp_bias")
    return llama_like.traits(config, sizes(config), positions=2048)


FAMILY = llama_like.family(
    name="llama",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.gated(bias="mlp_bias"),
    },
    dropped={**llama_like.OLD_BUFFERS, "rope.freqs": "rotary frequencies of Meta's files, computed from the config"},
    layouts=lambda table: {**hf_flax(table, PREFIX, "weight", fixed={"mlp_bias": False}), "easylm": EASYLM},
)
