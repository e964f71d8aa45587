"""Stored duplicates are compared by digests, or with the windows of their originals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.planning.plan import EqualityCheck
from prepcli.restore.weights_reader import find_duplicates
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import Source
from tests.helpers.tiny_checkpoints import GPT2, make_checkpoint, write_checkpoint

CHECK = EqualityCheck("lm_head.weight", "wte.weight")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Open a tied model whose stored head differs from the embedding."""
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    write_checkpoint(
        tmp_path / "tied", GPT2, tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}
    )
    return open_source(locate(str(tmp_path / "tied")))


def with_digests(source: Source, embedding: str, head: str) -> Source:
    """Return the source with digests of embedding and head."""
    digests = {CHECK.duplicate_of: embedding, CHECK.name: head}
    tensors = (
        replace(tensor, digests=((0, tensor.shape[0], digests[tensor.name]),))
        if tensor.name in digests
        else tensor
        for tensor in source.tensors
    )
    return replace(source, tensors=tuple(tensors))


def test_duplicates_without_digests_are_left_to_the_read(source: Source):
    duplicates = find_duplicates(source, [CHECK], verify=True)
    assert {name: [tensor.name for tensor in tensors] for name, tensors in duplicates.items()} == {
        "wte.weight": ["lm_head.weight"]
    }


def test_equal_digests_need_no_bytes(source: Source):
    assert not find_duplicates(with_digests(source, "0a", "0a"), [CHECK], verify=True)


def test_bytes_are_compared_if_digests_differ(source: Source):
    with pytest.raises(PrepError, match=r"lm_head.weight is not equal"):
        find_duplicates(with_digests(source, "0a", "0b"), [CHECK], verify=True)
    assert find_duplicates(with_digests(source, "0a", "0b"), [CHECK], verify=False)
