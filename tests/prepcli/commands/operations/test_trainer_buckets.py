"""Outputs for other trainers in an object store: written, checked and converted back without a changed bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError
from prepcli.stores import byte_ranges
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)

pytestmark = pytest.mark.waits

OUT = "s3://bucket/out"
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED_QUERY | {"model_type": "llama", "head_dim": 8},
    "gemma3": GROUPED_QUERY | {"model_type": "gemma3_text", "num_hidden_layers": 7},
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"] | {"model_type": "gpt_oss"},
}
CASES = {
    "maxtext llama": ("maxtext", "llama"),
    "maxtext gemma3": ("maxtext", "gemma3"),
    "torchtitan llama": ("torchtitan", "llama"),
    "torchtitan gpt_oss": ("torchtitan", "gpt_oss"),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    with use_objects(monkeypatch, {}) as store:
        yield store


@pytest.mark.parametrize("case", slow_except(CASES, ("maxtext gemma3", "torchtitan gpt_oss")))
def test_output_for_a_trainer_in_a_bucket_returns(store: FakeObjectStore, case: str):
    layout, model = CASES[case]
    tensors = make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    # In float32, the way back of MaxText's scales returns every value.
    words = ("--dtype", "float32") if layout == "maxtext" else ()
    run_ok("export", "./model", "--layout", layout, *words, "--out", OUT)
    assert prep.verify(OUT)
    # The names of the tensors are those of Hugging Face.
    contents = prep.inspect(OUT)
    assert contents.parameters == sum(tensor.size for tensor in tensors.values())
    run_ok("save-init", OUT, "--dtype", "bfloat16", "--out", "init", "--mesh", "1,2,1")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("case", slow_except(CASES, ("maxtext gemma3", "torchtitan gpt_oss")))
def test_changed_byte_of_a_bucket_is_found(store: FakeObjectStore, case: str):
    layout, model = CASES[case]
    make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--out", OUT)
    assert prep.verify(OUT, "./model")
    data = [key for key in store.objects if "/d/" in key or key.endswith(".distcp")]
    key = max(data, key=lambda key: len(store.objects[key]))
    content = bytearray(store.objects[key])
    content[len(content) // 2] ^= 1
    store.store(key, bytes(content))
    # A changed byte between two tensors is found when the checkpoint is opened.
    with suppress(DamagedError):
        assert not prep.verify(OUT)
