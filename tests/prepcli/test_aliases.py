"""The table of aliases against the shapes that the published configurations say."""

from __future__ import annotations

import pytest

from prepcli.aliases import ALIASES, BY_NAME, FAMILIES


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


PARAMETERS = {
    "gpt2": gpt2(12, 768),
    "gpt2-medium": gpt2(24, 1024),
    "gpt2-large": gpt2(36, 1280),
    "gpt2-xl": gpt2(48, 1600),
    "gpt-neo-125M": gpt_neo(12, 768),
    "gpt-neo-1.3B": gpt_neo(24, 2048),
    "gpt-neo-2.7B": gpt_neo(32, 2560),
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


def test_only_families_that_work_have_aliases() -> None:
    assert FAMILIES == ("gpt2", "gpt_neo", "llama")
