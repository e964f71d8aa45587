"""Checks of the arguments of the public functions."""

from __future__ import annotations

import io
import traceback
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.console.progress_displays import LineProgress
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

RECIPE = "recipe.toml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=256)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"msh": "1,2,1"}, "unknown option `msh`.*did you mean `mesh`"),
        ({"mesh": (1, 2, 1)}, r"invalid `mesh=\(1, 2, 1\)` - the expected type is str | None"),
        ({"mesh": ""}, "invalid `mesh=''` - it is empty"),
        ({"pad_vocab": 8.0}, "invalid `pad_vocab=8.0`"),
        ({"pad_vocab": 0}, 'invalid `pad_vocab="0"`'),
        ({"scan": "no"}, "invalid `scan='no'`"),
        ({"overwrite": "no"}, "invalid `overwrite='no'`"),
        ({"scan_axis": True}, "invalid `scan_axis=True`"),
        ({"scan_axis": 2}, "invalid `scan_axis=2` - the expected type is 0 | 1 | None"),
        ({"dtype": "bf16"}, "invalid `dtype='bf16'` - the expected type is 'float32' | 'bfloat16'"),
        ({"rules": 3}, "invalid `rules=3`"),
        ({"rules": ["a=fsdp", 3]}, "invalid `rules="),
        ({"true_vocab": 0}, "invalid `true_vocab=0` - it must be at least 1"),
        ({"memory": 0}, '`memory="0"` is below the minimum'),
        ({"memory": "8MiB"}, '`memory="8MiB"` is below the minimum'),
        ({"compress": ""}, "invalid `compress=''` - it is empty"),
        ({"revision": ""}, "invalid `revision=''` - it is empty"),
    ],
)
def test_save_init_rejects_invalid_options(
    model: Path, tmp_path: Path, options: dict[str, Any], what: str
):
    with pytest.raises(prep.UsageError, match=what):
        prep.save_init(model, tmp_path / "init", **options)
    with pytest.raises(prep.UsageError, match=what):
        prep.save_init(model, dry_run=True, **options)
    assert not (tmp_path / "init").exists()


@pytest.mark.parametrize(
    "options", [{"multiple": 0}, {"size": 0}, {"size": -1}, {"mesh": ""}, {"seed": -1}]
)
def test_pad_vocab_rejects_falsy_option_values(
    model: Path, tmp_path: Path, options: dict[str, Any]
):
    with pytest.raises(prep.UsageError, match="invalid"):
        prep.pad_vocab(model, tmp_path / "padded", **options)
    assert not (tmp_path / "padded").exists()


@pytest.mark.parametrize("size", [0, "0", "5"])
def test_export_rejects_sizes_of_empty_files(model: Path, tmp_path: Path, size: int | str):
    with pytest.raises(prep.UsageError, match="shard_size"):
        prep.export(model, tmp_path / "back", shard_size=size)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ""},
        {"mesh": 8},
        {"dtype": "int8"},
        {"verify": "no"},
        {"max_new_tokens": 0},
        {"max_new_tokens": "8"},
        {"temperature": "hot"},
        {"top_k": 2.5},
        {"seed": True},
        {"batch_size": 0},
        {"tokens": [1, 2]},
        {"tokens": "1,2"},
        {"prompts": 3},
        {"tokenizer": ""},
        {"step": -1},
        {"batch": 8},
    ],
)
def test_generate_rejects_invalid_options(model: Path, options: dict[str, Any]):
    arguments: dict[str, Any] = {"tokens": [[1, 2]], **options}
    with pytest.raises(prep.UsageError, match=next(iter(options))):
        prep.generate(model, **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": {"train.steps": 10}},
        {"restart": 1},
        {"force": 1},
        {"stop_after": -1},
        {"stop_after": "10"},
        {"out": 3},
        {"out": ""},
        {"stop": 10},
    ],
)
def test_train_rejects_invalid_options(tmp_path: Path, options: dict[str, Any]):
    with pytest.raises(prep.UsageError, match=next(iter(options))):
        prep.train(tmp_path / RECIPE, **options)


def test_train_accepts_one_override_as_text(tmp_path: Path):
    (tmp_path / RECIPE).write_text('name = "a"\n')
    with pytest.raises(prep.PrepError) as caught:
        prep.train(tmp_path / RECIPE, tmp_path / "run", overrides="train.stps=10")
    assert "train.stps" in str(caught.value)


@pytest.mark.parametrize("progress", [print, io.StringIO(), LineProgress])
def test_progress_without_the_methods_is_a_usage_error(model: Path, tmp_path: Path, progress: Any):
    with pytest.raises(prep.UsageError, match="methods begin, advance, note and end"):
        prep.save_init(model, tmp_path / "init", progress=progress)
    with pytest.raises(prep.UsageError, match="methods begin, advance, note and end"):
        prep.load_params(model, progress=progress)


@pytest.mark.parametrize("arguments", [(3,), ("",), ("model", "out", "extra")])
def test_save_init_checks_positional_arguments(arguments: tuple[Any, ...]):
    with pytest.raises((prep.UsageError, TypeError), match=r"`checkpoint=|positional"):
        prep.save_init(*arguments)


def test_inspect_checks_its_arguments(model: Path):
    with pytest.raises(prep.UsageError, match="invalid `offline='yes'`"):
        prep.inspect(model, offline="yes")  # pyright: ignore[reportArgumentType]


def test_errors_show_no_frames_inside_of_prep(tmp_path: Path) -> None:
    with pytest.raises(prep.PrepError) as caught:
        prep.inspect(tmp_path / "missing")
    frames = traceback.extract_tb(caught.value.__traceback__)
    # The call, and the function that checks the arguments of every operation.
    assert [Path(frame.filename).name for frame in frames] == [Path(__file__).name, "operation.py"]
