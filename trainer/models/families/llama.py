"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from trainer.models.architecture import ROPE, Traits, only_knows
from trainer.models.families import _llama_style
from trainer.models.families._llama_style import PREFIX
from trainer.models.layouts import EASYLM, hf_flax
from trainer.models.parameters import Config


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; LlamaConfig's defaults where a field is absent."""
    found = _llama_style.sizes(config)
    # dims of a head that are turned together: HF has them `half` apart, EasyLM side by side
    return {**found, "two": 2, "half": found["head_dim"] // 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "attention_bias", "mlp_bias")
    return _llama_style.traits(config, sizes(config), positions=2048)


FAMILY = _llama_style.family(
    name="llama",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **_llama_style.NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.gated(bias="mlp_bias"),
    },
    dropped={**_llama_style.OLD_BUFFERS, "rope.freqs": "rotary frequencies of Meta's files, computed from the config"},
    layouts=lambda table: {**hf_flax(table, PREFIX, "weight", fixed={"mlp_bias": False}), "easylm": EASYLM},
)
