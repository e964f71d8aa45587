"""The public functions of `import prepcli`, on tiny checkpoints, and the checks of their arguments."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.console.progress_displays import LineProgress
from prepcli.commands.operations import compute_options, options, results, run_results
from prepcli.restore.item_reader import open_reader
from tests.helpers.damage import flip_bit, flip_used_bit, largest_file, tensor_place
from tests.helpers.run_cli import Capture, MonkeyPatch
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from trainer.training.metrics import METRICS_FILE, read_metrics

# The parts from which options are defined, and options that only commands have.
NOT_EXPORTED = (
    "ConversionArguments",
    "GenerateArguments",
    "Minimum",
    "OptionSpec",
    "SourceTreeOptions",
    "StorageOptions",
    "TokenizeArguments",
    "TreeOptions",
    "_HtmlTable",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=257)
    return tmp_path / "model"


class RecordedProgress:
    """A progress object that records the tasks."""

    def __init__(self) -> None:
        self.tasks: list[str] = []

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.tasks.append(task)

    def advance(self, written_bytes: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


def test_api_exports_every_name_in_all():
    assert [name for name in prep.__all__ if not hasattr(prep, name)] == []
    assert {*prep.__all__} <= {*dir(prep)}


@pytest.mark.parametrize("module", [options, compute_options, results, run_results])
def test_api_exports_the_types_of_options_and_results(module: ModuleType):
    named = vars(module).items()
    classes = {
        name: value
        for name, value in named
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and name not in NOT_EXPORTED
    }
    assert len(classes) >= 3
    assert {name: getattr(prep, name) for name in classes} == classes
    assert {*classes} <= {*prep.__all__}


def test_api_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pad'"):
        prep.pad  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_api_import_is_lazy():
    code = "import sys, prepcli; print('numpy' in sys.modules, 'jax' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "False False\n"


def test_api_converts_there_and_back(model: Path, tmp_path: Path, capfd: Capture):
    padded = prep.pad_vocab(model, tmp_path / "padded", multiple=8)
    init = prep.save_init(padded.path, tmp_path / "init", mesh="1,2,1")
    again = prep.reshard(init.path, tmp_path / "again", mesh="1,1,2", compress="zstd")
    back = prep.export(again.path, tmp_path / "back", shard_size="1MB")
    assert prep.verify(back.path, model).is_equal
    assert init.bytes_written > 0
    # Freed memory of earlier tests may be enough.
    assert 0 <= init.peak_bytes <= 512 << 20
    assert not init.already_done
    assert init.stage_seconds.keys() == {"read", "move", "write"}
    assert init.stage_seconds["write"] > 0
    assert capfd.readouterr() == ("", "")


def test_verbose_command_prints_the_busy_times(model: Path, tmp_path: Path, capfd: Capture):
    words = ["save-init", str(model), "--mesh", "1,2,1", "--out", str(tmp_path / "init"), "-v"]
    assert main(words) == 0
    line = r"^busy: read [\d.]+ s, move [\d.]+ s, write [\d.]+ s$"
    assert re.search(line, capfd.readouterr().err, re.MULTILINE)


def test_api_plans_equal_the_conversions(model: Path, tmp_path: Path):
    plan = prep.save_init(model, mesh="1,1,2", pad_vocab="auto", dry_run=True).plan
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    result = prep.save_init(model, tmp_path / "init", mesh="1,1,2", pad_vocab="auto")
    assert plan.write_nbytes == result.bytes_written
    resharded = prep.reshard(result.path, mesh="1,2,1", dry_run=True).plan
    assert resharded.write_nbytes == result.bytes_written


def test_api_plan_text_lists_files_and_tensors(model: Path):
    plan = prep.pad_vocab(model, multiple=8, dry_run=True).plan
    tensors = prep.inspect(model).tensors
    nbytes = sum(tensor.nbytes for tensor in tensors) + 7 * 32 * 4
    text = f"<Plan pad-vocab of {model}: {len(tensors)} tensors, {nbytes:,} bytes in "
    assert repr(plan).startswith(text)
    lines = str(plan).splitlines()
    assert lines[0] == repr(plan)
    assert len(lines) == 1 + len(plan.files) + len(plan.streams)
    assert (
        "move  transformer.wte.weight  float32 [264, 32]  rows 257:264  896 bytes  filled with zeros"
        in lines
    )


def test_api_verify_lists_differences(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init", dtype="bfloat16").path
    assert prep.verify(init)
    result = prep.verify(init, model)
    assert not result
    assert not result.is_equal
    assert result.differences


def test_api_load_params_reads_any_format(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init", pad_vocab="8").path
    from_folder, from_init = prep.load_params(model), prep.load_params(init)
    query = from_folder["layers"]["attn"]["q"]["weight"]
    np.testing.assert_array_equal(query, from_init["layers"]["attn"]["q"]["weight"])
    assert query.ndim == 4  # [layers, heads, head_dim, embed]
    assert prep.load_params(init, "2,2,2")["embed"]["tokens"].sharding.num_devices == 8


def test_api_accepts_a_multiple_as_number_and_a_rule_as_text(model: Path, tmp_path: Path):
    from_number = prep.save_init(model, tmp_path / "number", pad_vocab=100)
    from_text = prep.save_init(model, tmp_path / "text", pad_vocab="100")
    first, second = (
        json.loads((result.path / "prep-manifest.json").read_text())
        for result in (from_number, from_text)
    )
    assert first["config"]["vocab_size"] == 300
    assert first["request"] == second["request"]
    plan = prep.save_init(model, mesh="1,2,1", rules="embed=none", dry_run=True).plan
    assert [*plan.settings["rules"]] == ["embed=none"]


def test_api_verify_counts_the_ignored_padding(model: Path, tmp_path: Path):
    padded = prep.pad_vocab(model, tmp_path / "padded", multiple=8).path
    result = prep.verify(padded, model)
    assert (result.is_equal, result.ignored_padding_rows) == (True, 7)
    assert result.values == prep.verify(model, model).values
    assert prep.verify(padded, model, quick=True).ignored_padding_rows == 7
    assert prep.verify(padded).ignored_padding_rows == 0
    assert prep.verify(padded).values == prep.inspect(padded).parameters


def test_api_names_of_a_damaged_tensor_agree(model: Path, tmp_path: Path):
    folder = prep.pad_vocab(model, tmp_path / "padded", multiple=8).path
    name = "params.embed.tokens (transformer.wte.weight)"
    path, low, _ = tensor_place(folder, "transformer.wte.weight")
    flip_bit(path, low)
    difference = prep.verify(folder).differences[0]
    assert f"{difference['leaf']} ({difference['tensor']})" == name
    with pytest.raises(prep.DamagedError) as caught:
        prep.load_params(folder)
    assert caught.value.what == f"{name} in {folder} is damaged"


def test_api_names_of_a_damaged_leaf_agree(model: Path, tmp_path: Path):
    init = prep.save_init(model, tmp_path / "init").path
    flip_used_bit(largest_file(init / "d"))
    with pytest.raises(prep.DamagedError) as caught:
        prep.load_params(init)
    assert caught.value.what == f"{prep.verify(init).differences[0]['leaf']} of {init} is damaged"


class RecordedNotes:
    """An Observer of a Python program."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, level: int = 0) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.notes.append(text)

    def progress(self) -> RecordedProgress:
        return RecordedProgress()


def test_observer_of_a_program_receives_notes(model: Path):
    observer = RecordedNotes()
    prep.pad_vocab(model, model.with_name("padded"), multiple=8, progress=observer)
    assert any("vocabulary 257 -> 264" in note for note in observer.notes)


def test_errors_name_arguments_beside_an_observer(model: Path):
    options: dict[str, Any] = {"progress": RecordedNotes()}
    with pytest.raises(prep.UsageError, match="`size=5` is too small"):
        prep.pad_vocab(model, size=5, **options)
    options["multiple"] = "8"
    with pytest.raises(prep.UsageError) as caught:
        prep.pad_vocab(model, **options)
    assert "multiple" in caught.value.what
    assert "--" not in str(caught.value)


# Checks of the arguments of the public functions


RECIPE = "recipe.toml"


@pytest.fixture
def even_model(tmp_path: Path) -> Path:
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
    even_model: Path, tmp_path: Path, options: dict[str, Any], what: str
):
    with pytest.raises(prep.UsageError, match=what):
        prep.save_init(even_model, tmp_path / "init", **options)
    with pytest.raises(prep.UsageError, match=what):
        prep.save_init(even_model, dry_run=True, **options)
    assert not (tmp_path / "init").exists()


# Function and invalid options. The error names the first one.
INVALID_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("pad_vocab", {"multiple": 0}),
    ("pad_vocab", {"size": 0}),
    ("pad_vocab", {"size": -1}),
    ("pad_vocab", {"multiple": 8, "size": 300}),
    ("pad_vocab", {"mesh": ""}),
    ("pad_vocab", {"seed": -1}),
    ("export", {"shard_size": 0}),
    ("export", {"shard_size": "0"}),
    ("export", {"shard_size": "5"}),
    ("inspect", {"offline": "yes"}),
    ("generate", {"mesh": ""}),
    ("generate", {"mesh": 8}),
    ("generate", {"dtype": "int8"}),
    ("generate", {"verify": "no"}),
    ("generate", {"max_new_tokens": 0}),
    ("generate", {"max_new_tokens": "8"}),
    ("generate", {"temperature": "hot"}),
    ("generate", {"top_k": 2.5}),
    ("generate", {"seed": True}),
    ("generate", {"batch_size": 0}),
    ("generate", {"tokens": [1, 2]}),
    ("generate", {"tokens": "1,2"}),
    ("generate", {"prompts": 3}),
    ("generate", {"tokenizer": ""}),
    ("generate", {"step": -1}),
    ("generate", {"batch": 8}),
    ("load_params", {"mesh": "2,2,4"}),
    ("load_params", {"dtype": "int8"}),
    ("train", {"overrides": {"train.steps": 10}}),
    ("train", {"restart": 1}),
    ("train", {"force": 1}),
    ("train", {"stop_after": -1}),
    ("train", {"stop_after": "10"}),
    ("train", {"out": 3}),
    ("train", {"out": ""}),
    ("train", {"stop": 10}),
]


@pytest.mark.parametrize(("function", "options"), INVALID_OPTIONS)
def test_functions_reject_invalid_options(even_model: Path, function: str, options: dict[str, Any]):
    required: dict[str, Any] = {"tokens": [[1, 2]]} if function == "generate" else {}
    with pytest.raises(prep.UsageError, match=next(iter(options))):
        getattr(prep, function)(even_model, **{**required, **options})
    assert [path.name for path in Path().iterdir()] == ["model"]


def test_train_accepts_one_override_as_text(tmp_path: Path):
    (tmp_path / RECIPE).write_text('name = "a"\n')
    with pytest.raises(prep.PrepError) as caught:
        prep.train(tmp_path / RECIPE, tmp_path / "run", overrides="train.stps=10")
    assert "train.stps" in str(caught.value)


@pytest.mark.parametrize("progress", [print, io.StringIO(), LineProgress])
def test_progress_without_the_methods_is_a_usage_error(
    even_model: Path, tmp_path: Path, progress: Any
):
    with pytest.raises(prep.UsageError, match="methods begin, advance, note and end"):
        prep.save_init(even_model, tmp_path / "init", progress=progress)
    with pytest.raises(prep.UsageError, match="methods begin, advance, note and end"):
        prep.load_params(even_model, progress=progress)


@pytest.mark.parametrize("arguments", [(3,), ("",), ("model", "out", "extra")])
def test_save_init_checks_positional_arguments(arguments: tuple[Any, ...]):
    with pytest.raises((prep.UsageError, TypeError), match=r"`checkpoint=|positional"):
        prep.save_init(*arguments)


def test_errors_show_no_frames_inside_of_prep(tmp_path: Path) -> None:
    with pytest.raises(prep.PrepError) as caught:
        prep.inspect(tmp_path / "missing")
    frames = traceback.extract_tb(caught.value.__traceback__)
    # The call, and the function that checks the arguments of every operation.
    assert [Path(frame.filename).name for frame in frames] == [Path(__file__).name, "operation.py"]


# `prep.train` with a loss and metrics of the caller


@pytest.fixture
def recipe(monkeypatch: MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    return next(str(path) for path in Path().glob("*.toml"))


def doubled_loss(logits: Array, targets: Array) -> Array:
    """Return twice the cross entropy."""
    return -2 * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def cross_entropy_metric(logits: Array, targets: Array) -> dict[str, Array]:
    return {"nats": doubled_loss(logits, targets) / 2}


def test_train_with_a_loss_function_logs_it_and_resumes_with_it(recipe: str):
    changes = ("train.steps=2", "train.eval_every=2", "checkpoint.every=1")
    first = prep.train(recipe, "run", overrides=changes, stop_after=1, loss_fn=doubled_loss)
    assert (first.step, first.is_finished) == (1, False)
    with pytest.raises(
        prep.PrepError,
        match=r"the loss function has changed since the run began - .*doubled_loss, now",
    ):
        prep.train(recipe, "run", overrides=changes)
    last = prep.train(
        recipe, "run", overrides=changes, loss_fn=doubled_loss, metric_fn=cross_entropy_metric
    )
    assert last.is_finished
    with open_reader(Path("run/2"), verify=False) as reader:
        manifest = dict(reader.manifest)
    assert manifest["loss_fn"] == f"{__name__}.doubled_loss"
    lines = read_metrics(Path("run") / METRICS_FILE)
    losses = [line["loss"] for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    # The losses differ a little: the weights are random, and the rows are others.
    assert losses[0] == pytest.approx(2 * evaluations[0]["eval_loss"], rel=0.05)
    assert [line["eval_nats"] for line in evaluations if "eval_nats" in line] == pytest.approx(
        [evaluations[-1]["eval_loss"]], rel=1e-5
    )


def test_train_rejects_functions_that_do_not_fit(recipe: str):
    options: dict[str, Any] = {"loss_fn": "focal"}
    with pytest.raises(
        prep.UsageError,
        match=r"invalid `loss_fn='focal'` - the expected type is a function \| None",
    ):
        prep.train(recipe, "run", **options)
    with pytest.raises(prep.UsageError, match=r"`train\.reduction` is exact"):
        prep.train(recipe, "run", overrides="train.reduction=exact", loss_fn=doubled_loss)
    assert not Path("run").exists()


def test_inspect_checks_its_arguments(even_model: Path):
    with pytest.raises(prep.UsageError, match="invalid `offline='yes'`"):
        prep.inspect(even_model, offline="yes")  # pyright: ignore[reportArgumentType]
