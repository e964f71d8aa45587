"""Patterns of leaves in a recipe."""

from __future__ import annotations

import pytest

from prepcli.models.param_tree import matches_any


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("embed.tokens", "embed.tokens", True),
        ("embed", "embed.tokens", True),
        ("emb", "embed.tokens", False),
        ("layers.attn.q", "layers.7.attn.q.weight", True),
        ("layers.7", "layers.7.attn.q.weight", False),
        ("re:attn\\.[qk]", "layers.7.attn.k.weight", True),
        ("re:^attn", "layers.attn.k.weight", False),
        ("re:.", "head.weight", True),
    ],
)
def test_patterns_match_paths_without_layer_numbers(pattern: str, path: str, matches: bool):
    assert matches_any([pattern], path) is matches
    assert not matches_any([], path)
