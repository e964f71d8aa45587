"""`load_params` of checkpoints without a family: values, dtypes, shardings and NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.core.errors import PrepError
from prepcli.models.verbatim import CANNOT_TRAIN
from tests.helpers.run_cli import run_ok
from tests.helpers.stored_tensors import StoredTensor, write_safetensors

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def stored(values: np.ndarray, code: str) -> StoredTensor:
    return code, values.shape, values.tobytes()


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a model with stacked layers, integers, 64-bit tensors and fp8 to the working folder."""
    monkeypatch.chdir(tmp_path)
    tensors: dict[str, StoredTensor] = {}
    for layer in range(3):
        tensors[f"h.{layer}.w"] = stored((VALUES + layer).astype(ml_dtypes.bfloat16), "BF16")
    tensors["ids"] = stored(np.arange(5, dtype=np.int64) << 40, "I64")
    tensors["packed"] = stored(np.arange(8, dtype=np.uint8), "U8")
    tensors["wide"] = stored(VALUES.astype(np.float64) / 3, "F64")
    tensors["fp8"] = stored(VALUES.astype(ml_dtypes.float8_e4m3fn), "F8_E4M3")
    tensors["none"] = ("F32", (0, 3), b"")
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text('{"model_type": "unheard_of"}')


@pytest.mark.parametrize("source", ["m", "m-init", "unstacked"])
def test_leaves_have_names_and_values_of_the_file(source: str):
    if source != "m":
        run_ok(
            "save-init", "./m", "--out", source, *(["--no-scan"] if source == "unstacked" else [])
        )
    tree: dict[str, Any] = prep.load_params(f"./{source}", dtype="keep")
    assert tree.keys() == {"h.*.w", "ids", "packed", "wide", "fp8", "none"}
    expected = np.stack([VALUES, VALUES + 1, VALUES + 2]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(tree["h.*.w"]), expected)
    assert isinstance(tree["ids"], np.ndarray)
    np.testing.assert_array_equal(tree["ids"], np.arange(5, dtype=np.int64) << 40)
    assert isinstance(tree["wide"], np.ndarray)
    np.testing.assert_array_equal(tree["wide"], VALUES.astype(np.float64) / 3)
    assert tree["packed"].dtype == np.uint8
    assert tree["fp8"].dtype == ml_dtypes.float8_e4m3fn
    assert tree["none"].shape == (0, 3)


def test_dtype_casts_floating_point_leaves_only():
    tree: dict[str, Any] = prep.load_params("./m", dtype="float32")
    assert tree["h.*.w"].dtype == tree["wide"].dtype == np.float32
    np.testing.assert_array_equal(
        np.asarray(tree["wide"]), (VALUES.astype(np.float64) / 3).astype(np.float32)
    )
    assert (tree["packed"].dtype, tree["ids"].dtype) == (np.uint8, np.int64)


def test_mesh_splits_leaves_by_size():
    tree: dict[str, Any] = prep.load_params("./m", "2,2,2", dtype="keep")
    shards = tree["h.*.w"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(3, 2, 3)] * 8


def test_excluded_verbatim_family_raises():
    with pytest.raises(PrepError, match="model_type `unheard_of` is not supported"):
        prep.load_params("./m", verbatim=False)
    run_ok("save-init", "./m")
    with pytest.raises(PrepError, match=CANNOT_TRAIN):
        prep.load_params("./m-init", verbatim=False)
