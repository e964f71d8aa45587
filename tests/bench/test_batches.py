"""`bench.batches`: both systems read every block once, as equal arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.batches import BATCH_SIZE, SEQ_LENGTH, SYSTEMS, tokens_per_s, write_tokens


@pytest.mark.parametrize("name", SYSTEMS)
def test_system_reads_the_blocks_of_the_file(name: str, tmp_path: Path):
    if name == "grain":
        pytest.importorskip("grain")
    n_blocks = 2 * BATCH_SIZE
    path = write_tokens(tmp_path, 2 * n_blocks * SEQ_LENGTH)
    blocks = np.fromfile(path, np.uint16).reshape(n_blocks, SEQ_LENGTH)
    batches = list(SYSTEMS[name](path))
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    assert sorted(map(tuple, tokens.tolist())) == sorted(map(tuple, blocks.tolist()))
    for batch in batches:
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])
        assert batch["weights"].sum() == BATCH_SIZE * (SEQ_LENGTH - 1)
    assert tokens_per_s(iter(batches)) > 0
