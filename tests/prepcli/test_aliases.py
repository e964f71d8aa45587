"""The table of aliases against the shapes that the published configurations say."""

from __future__ import annotations

import pytest

from prepcli.aliases import ALIASES, BY_NAME, FAMILIES
from trainer.families import FAMILIES as KNOWN


def gpt2(layers: int, embed: int) -> int:
    return gpt_neo(layers, embed, positions=1024) + layers * 3 * embed  # q, k and v have a bias


def gpt_neo(layers: int, embed: int, vocab: int = 50257, positions: int = 2048) -> int:
    attention = 4 * embed * embed + embed  # q, k and v have no bias
    mlp = 2 * 4 * embed * embed + 4 * embed + embed
    norm = 2 * embed
    return (vocab + positions) * embed + layers * (attention + mlp + 2 * norm) + norm  # the head is tied


def llama(
    layers: int, embed: int, mlp: int, heads: int, kv_heads: int = 0, vocab: int = 32000, tied: bool = False
) -> int:
    head_dim = 128 if embed > 2048 else 64
    q_and_out = 2 * heads * head_dim * embed
    k_and_v = 2 * (kv_heads or heads) * head_dim * embed
    block = q_and_out + k_and_v + 3 * mlp * embed + 2 * embed
    return (1 if tied else 2) * vocab * embed + layers * block + embed


def biased(layers: int, embed: int) -> int:
    """Layers of four square matrices and two of a feed-forward part four times as wide, all with biases, two norms."""
    return layers * (12 * embed * embed + 13 * embed)


def gptj(layers: int, embed: int, vocab: int) -> int:
    block = 12 * embed * embed + 4 * embed + embed + 2 * embed  # attention has no bias, and there is one norm
    return 2 * vocab * embed + vocab + layers * block + 2 * embed


def neox(layers: int, embed: int, vocab: int = 50304) -> int:
    return 2 * vocab * embed + biased(layers, embed) + 2 * embed


def opt(layers: int, embed: int) -> int:
    return 50272 * embed + 2050 * embed + biased(layers, embed) + 2 * embed


def opt_350m() -> int:
    return 50272 * 512 + 2050 * 1024 + biased(24, 1024) + 2 * 512 * 1024  # projections and no last norm


def relative(
    layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool = False,
    norms: int = 2, more: int = 0, experts: int = 1,
) -> int:  # fmt: skip
    """Of LLaMA: `more` values a layer than its matrices and norms of the width of the stream."""
    attention = 2 * (heads + kv_heads) * head_dim * embed
    block = attention + experts * 3 * mlp * embed + (experts * embed if experts > 1 else 0) + norms * embed + more
    return (1 if tied else 2) * vocab * embed + layers * block + embed


PARAMETERS = {
    "gpt2": gpt2(12, 768),
    "gpt2-medium": gpt2(24, 1024),
    "gpt2-large": gpt2(36, 1280),
    "gpt2-xl": gpt2(48, 1600),
    "gpt-neo-125M": gpt_neo(12, 768),
    "gpt-neo-1.3B": gpt_neo(24, 2048),
    "gpt-neo-2.7B": gpt_neo(32, 2560),
    "gpt-j-6b": gptj(28, 4096, 50400),
    "pythia-70m": neox(6, 512),
    "pythia-160m": neox(12, 768),
    "pythia-410m": neox(24, 1024),
    "pythia-1b": neox(16, 2048),
    "pythia-1.4b": neox(24, 2048),
    "pythia-2.8b": neox(32, 2560),
    "pythia-6.9b": neox(32, 4096, 50432),
    "pythia-12b": neox(36, 5120, 50688),
    "gpt-neox-20b": neox(44, 6144, 50432),
    "opt-125m": opt(12, 768),
    "opt-350m": opt_350m(),
    "opt-1.3b": opt(24, 2048),
    "opt-2.7b": opt(32, 2560),
    "opt-6.7b": opt(32, 4096),
    "opt-13b": opt(40, 5120),
    "llama-7b": llama(32, 4096, 11008, 32),
    "llama-13b": llama(40, 5120, 13824, 40),
    "llama-30b": llama(60, 6656, 17920, 52),
    "llama-65b": llama(80, 8192, 22016, 64),
    "llama-2-7b": llama(32, 4096, 11008, 32),
    "llama-2-13b": llama(40, 5120, 13824, 40),
    "llama-2-70b": llama(80, 8192, 28672, 64, 8),
    "llama-3-8b": llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-8b": llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": llama(126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": llama(16, 2048, 8192, 32, 8, 128256, tied=True),
    "llama-3.2-3b": llama(28, 3072, 8192, 24, 8, 128256, tied=True),
    "mistral-7b": relative(32, 4096, 14336, 32, 8, 128, 32000),
    "mixtral-8x7b": relative(32, 4096, 14336, 32, 8, 128, 32000, experts=8),
    "qwen2.5-0.5b": relative(24, 896, 4864, 14, 2, 64, 151936, tied=True, more=18 * 64),  # biases of q, k and v
    "qwen2.5-1.5b": relative(28, 1536, 8960, 12, 2, 128, 151936, tied=True, more=16 * 128),
    "qwen2.5-7b": relative(28, 3584, 18944, 28, 4, 128, 152064, more=36 * 128),
    "qwen3-0.6b": relative(28, 1024, 3072, 16, 8, 128, 151936, tied=True, more=2 * 128),  # norms of q and k
    "qwen3-1.7b": relative(28, 2048, 6144, 16, 8, 128, 151936, tied=True, more=2 * 128),
    "qwen3-8b": relative(36, 4096, 12288, 32, 8, 128, 151936, more=2 * 128),
    "qwen3-30b-a3b": relative(48, 2048, 768, 32, 4, 128, 151936, more=2 * 128, experts=128),
    "gemma-2b": relative(18, 2048, 16384, 8, 1, 256, 256000, tied=True),
    "gemma-7b": relative(28, 3072, 24576, 16, 16, 256, 256000, tied=True),
    "gemma-2-2b": relative(26, 2304, 9216, 8, 4, 256, 256000, tied=True, norms=4),
    "gemma-2-9b": relative(42, 3584, 14336, 16, 8, 256, 256000, tied=True, norms=4),
    "gemma-3-1b": relative(26, 1152, 6912, 4, 1, 256, 262144, tied=True, norms=4, more=2 * 256),
    "phi-3-mini": relative(32, 3072, 8192, 32, 32, 96, 32064),
    "phi-3.5-mini": relative(32, 3072, 8192, 32, 32, 96, 32064),
}


def test_every_alias_is_checked_here() -> None:
    assert [alias.name for alias in ALIASES] == list(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_what_the_shapes_add_up_to(name: str) -> None:
    assert BY_NAME[name].parameters == PARAMETERS[name]


def test_known_totals() -> None:
    assert BY_NAME["gpt-neo-1.3B"].nbytes == 5_262_303_232
    assert BY_NAME["llama-13b"].nbytes == 26_031_728_640


def test_names_are_unique_and_cannot_be_taken_for_hub_ids_or_paths() -> None:
    assert len(BY_NAME) == len(ALIASES)
    assert not any(set("/@~ ") & set(alias.name) for alias in ALIASES)
    assert all(alias.hub_id.count("/") == 1 for alias in ALIASES)


def test_families_that_work_have_aliases() -> None:
    assert {*FAMILIES} == {*KNOWN}
