"""`prep verify A B --tolerance`: the distances of each tensor are those that NumPy computes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import prepcli as prep
from prepcli.core.errors import FAILED, USAGE, UsageError
from tests.helpers.run_cli import run_failing, run_json
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors

NAME = "model.norm.weight"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `a` in float32 and its init in bfloat16, `b`, to the working folder."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("a"), LLAMA)
    prep.save_init("a", "b", dtype="bfloat16", pad_vocab="16")


def change(folder: Path, value: float) -> None:
    """Set the first value of the last norm."""
    for path in folder.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path)
        if NAME in tensors:
            tensors[NAME] = tensors[NAME].copy()
            tensors[NAME][0] = value
            safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def test_distances_of_a_cast_are_those_of_numpy():
    result = prep.verify("a", "b", tolerance=0.1)
    assert result
    tensors = read_tensors(Path("a"))
    assert {distance.tensor for distance in result.distances} == tensors.keys()
    for distance in result.distances:
        a = tensors[distance.tensor].astype(np.float64).ravel()
        b = tensors[distance.tensor].astype(ml_dtypes.bfloat16).astype(np.float64).ravel()
        assert distance.max_abs == np.abs(a - b).max()
        np.testing.assert_allclose(distance.mean_abs, np.abs(a - b).mean(), rtol=1e-12)
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        np.testing.assert_allclose(distance.cosine, cosine, rtol=1e-12)


def test_tensor_beyond_the_tolerance_is_a_difference(capsys):
    largest = max(distance.max_abs for distance in prep.verify("a", "b", tolerance=1).distances)
    assert prep.verify("a", "b", tolerance=largest)
    result = prep.verify("a", "b", tolerance=largest / 2)
    assert not result
    too_far = [d.tensor for d in result.distances if d.max_abs > largest / 2]
    assert [difference["tensor"] for difference in result.differences] == too_far
    err = run_failing(capsys, FAILED, "verify", "a", "b", "--tolerance", str(largest / 2))
    assert "differs by up to" in err


def test_equal_checkpoints_have_no_distance():
    result = prep.verify("a", "a", tolerance=0)
    assert result
    assert {(d.max_abs, d.mean_abs) for d in result.distances} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("value_a", "value_b", "is_equal"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.nan, 1.0, False),
        (np.inf, -np.inf, False),
        (np.inf, 1.0, False),
    ],
)
def test_nan_and_infinity_are_equal_only_to_themselves(capsys, value_a, value_b, is_equal):
    make_checkpoint(Path("c"), LLAMA)
    change(Path("a"), value_a)
    change(Path("c"), value_b)
    assert bool(prep.verify("a", "c", tolerance=1e9)) is is_equal
    report = run_json(capsys, "verify", "a", "c", "--tolerance", "1e9")
    (entry,) = [entry for entry in report["distances"] if entry["tensor"] == NAME]
    assert entry["max_abs"] == (0.0 if is_equal else None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("other_value", [None, 0.0])
def test_cosine_of_values_that_are_not_finite_is_nan(value: float, other_value: float | None):
    arrays = {"one": np.array([value, 0.0]), "other": np.array([value, 0.0])}
    if other_value is not None:
        arrays["other"][0] = other_value
    for name, array in arrays.items():
        Path(name).mkdir()
        safetensors.numpy.save_file({"x": array}, Path(name, "model.safetensors"))
    (distance,) = prep.verify("one", "other", tolerance=1, verbatim=True).distances
    assert np.isnan(distance.cosine)


def test_table_lists_the_largest_differences_first(capsys):
    from prepcli.commands.cli.main import main

    assert main(["verify", "a", "b", "--tolerance", "1", "-v"]) == 0
    out, err = capsys.readouterr()
    assert "largest difference" in out
    table = err[err.index("tensor ") :].splitlines()
    assert table[0].split() == ["tensor", "max", "mean", "cosine"]
    largest = [float(line.split()[-3]) for line in table[1:] if line.split()[-1:] != ["s"]]
    assert len(largest) == len(read_tensors(Path("a")))
    assert largest == sorted(largest, reverse=True)


def test_tolerance_needs_two_checkpoints_and_their_values(capsys):
    assert "second checkpoint" in run_failing(capsys, USAGE, "verify", "b", "--tolerance", "1")
    with pytest.raises(UsageError, match="exclude each other"):
        prep.verify("a", "b", tolerance=1, quick=True)
    run_failing(capsys, USAGE, "verify", "a", "b", "--tolerance", "-1")


def test_tolerance_is_a_number():
    with pytest.raises(UsageError, match="it must be at least 0"):
        prep.verify("a", "b", tolerance=float("nan"))
