"""Small checkpoints are read back as they were written."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from prepcli.commands.testing.checkpoints import read_checkpoint, write_checkpoint
from tests.helpers.tiny_checkpoints import read_tensors, same_bits


@pytest.mark.parametrize("files", [1, 3])
def test_read_checkpoint_returns_written_tensors(tmp_path: Path, files: int):
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{i}.weight": rng.standard_normal((3, 5)).astype(dtype)
        for i, dtype in enumerate(("float32", ml_dtypes.bfloat16, "float16"))
    }
    folder = write_checkpoint(tmp_path / "model", {"model_type": "llama"}, tensors, files)
    assert len(list(folder.glob("*.safetensors"))) == files
    for read in (read_checkpoint, read_tensors):
        assert read(folder).keys() == tensors.keys()
        assert all(same_bits(tensor, tensors[name]) for name, tensor in read(folder).items())
