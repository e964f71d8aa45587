"""Starts of `prep train`: from models of other formats, quantised ones, added tokens and random parameters."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED, USAGE
from prepcli.formats.manifest import saved_steps
from prepcli.models.mesh import parse_mesh
from prepcli.restore.weights_reader import WeightsReader
from tests.helpers.fork_server import start_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import run_code, run_failing_unchanged, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors
from tests.helpers.torch_checkpoints import to_torch, write_bin_folder
from tests.helpers.train_runs import read_step_files, set_keys, train_error, train_json
from tests.helpers.training_folder import RECIPE, WORDS, write_tokenizer
from trainer.recipe import load_recipe
from trainer.run.start import random_start

# `prep train` from models of other formats: the same steps as from an init, without an init.

pytestmark = pytest.mark.usefixtures("work_dir")

PREP_SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"

EXPORTS = {
    "hf-flax": ("--layout", "hf-flax"),
    "easylm": ("--layout", "easylm"),
    "maxtext": ("--layout", "maxtext"),
    "exported": (),
}


def train_two_steps(model: str, *words: str) -> dict[str, bytes]:
    """Train two steps, remove the run, and return the files of the second step."""
    assert (
        run_code(
            "train", "recipe.toml", "--stop-after", "2", "--set", f"model.path={model}", *words
        )
        == STOPPED
    )
    assert not Path("runs/recipe/init").exists()
    files = read_step_files("runs/recipe", 2)
    shutil.rmtree("runs")
    return files


def comparable(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Split the files of a step into data files, and its manifest without file times and the start's identity."""
    manifest = json.loads(files.pop("prep-manifest.json"))
    return files, {
        key: value
        for key, value in manifest.items()
        if key not in ("plan", "recipe", "digest", "origin")
    }


def make_source(kind: str) -> str:
    """Write the model `tiny` in another format, and return its path."""
    if kind in EXPORTS:
        run_ok("export", "tiny" if EXPORTS[kind] else "tiny-init", *EXPORTS[kind], "--out", kind)
    elif kind == "bin":
        torch = pytest.importorskip("torch")
        tensors = {name: to_torch(value) for name, value in read_tensors(Path("tiny")).items()}
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        write_bin_folder(Path("tiny"), Path("bin"), tensors, num_files=2)
    return kind


KINDS = ["tiny", "bin", "hf-flax", "easylm", "maxtext", "exported"]


@pytest.mark.parametrize("kind", slow_except(KINDS, ["maxtext"]))
def test_training_from_a_source_equals_training_from_its_init(kind: str):
    run_ok("save-init", "tiny", "--pad-vocab", "auto", "--mesh", "1,2,4", "--out", "init")
    assert comparable(train_two_steps(make_source(kind))) == comparable(train_two_steps("init"))


def test_resuming_does_not_need_the_source(capsys: pytest.CaptureFixture[str]):
    shutil.copytree("tiny", "other")
    words = ("--set", "model.path=other")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *words) == STOPPED
    shutil.rmtree("other")
    capsys.readouterr()
    code, report = train_json(capsys, *words)
    assert (code, report["resumed_at"], report["step"]) == (OK, 1, 12)
    assert Path("runs/recipe/12/state/hf/tokenizer.json").is_file()
    run_ok("inspect", "runs/recipe")


def test_dry_run_from_a_folder_reads_no_leaf(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise AssertionError("a leaf was read")

    monkeypatch.setattr(WeightsReader, "read", refuse)
    capsys.readouterr()
    code, report = train_json(capsys, "--dry-run", *set_keys("model.path=tiny", "mesh=1,4,2"))
    assert (code, report["dry_run"]) == (OK, True)
    assert not Path("runs").exists()


def test_folder_of_an_earlier_failed_start_is_accepted():
    Path("runs/recipe/init/tiny-init").mkdir(parents=True)
    assert (
        run_code("train", "recipe.toml", "--stop-after", "1", "--set", "model.path=tiny") == STOPPED
    )
    assert saved_steps(Path("runs/recipe")) == [1]


def test_damaged_tensor_of_an_exported_folder_stops_the_start(capsys: pytest.CaptureFixture[str]):
    make_source("exported")
    path = next(Path("exported").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _, what, why, _ = train_error(capsys, "--set", "model.path=exported")
    assert what.endswith("in exported is damaged")
    assert "differ from their recorded digest" in why
    assert saved_steps(Path("runs/recipe")) == []
    assert (
        run_code(
            "train",
            "recipe.toml",
            "--stop-after",
            "1",
            "--no-verify",
            "--set",
            "model.path=exported",
        )
        == STOPPED
    )


def test_stream_from_the_hub_equals_training_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = comparable(train_two_steps("tiny"))
    files = {path.name: path.read_bytes() for path in Path("tiny").iterdir()}
    large = tuple(name for name in files if name.endswith(".safetensors"))
    kept = {hashlib.sha256(files[name]).hexdigest(): files[name] for name in large}
    words = (
        "train",
        "recipe.toml",
        "--stop-after",
        "2",
        "--stream",
        "--set",
        "model.path=o/tiny",
        "-q",
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with (
        serve_ranges(kept) as store,
        serve_hub({"o/tiny": FakeRepo(files, large=large, store=store)}) as hub,
    ):
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        running = start_python(PREP_SCRIPT, *words, has_jax=True)
        out, err = running.communicate()
    assert running.returncode == STOPPED, out + err
    assert comparable(read_step_files("runs/recipe", 2)) == expected
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_stream_of_a_local_folder_is_rejected(capsys: pytest.CaptureFixture[str]):
    code, what, *_ = train_error(capsys, "--stream", "--set", "model.path=tiny")
    assert (code, what) == (USAGE, "`--stream` has no effect")


# `prep train` with random initial parameters.

RANDOM = RECIPE.replace(
    'path = "tiny-init"',
    'init = "random"\nconfig = "tiny"\noverrides = { num_hidden_layers = 2, vocab_size = 133 }',
)


@pytest.fixture
def random_dir(work_dir: Path) -> Path:
    Path("recipe.toml").write_text(RANDOM)
    return work_dir


def export_run(recipe_options: Sequence[str], out: str) -> dict[str, np.ndarray]:
    run_ok("train", "recipe.toml", "--out", f"run-{out}", *recipe_options)
    run_ok("export", f"run-{out}", "--out", out)
    return read_tensors(Path(out))


def test_random_start_trains_resumes_and_exports(
    random_dir: Path, capsys: pytest.CaptureFixture[str]
):
    tensors = export_run((), "whole")
    assert json.loads(Path("whole/config.json").read_text())["num_hidden_layers"] == 2
    assert tensors["model.embed_tokens.weight"].shape[0] == 133
    assert Path("whole/tokenizer.json").exists()
    assert main(["train", "recipe.toml", "--out", "run-parts", "-q", "--stop-after", "5"]) != OK
    resumed = export_run((), "parts")
    assert all(np.array_equal(tensors[name], resumed[name]) for name in tensors)
    run_ok("verify", "whole", "run-whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("model.overrides={ num_hiden_layers = 2 }",), "did you mean `num_hidden_layers`?"),
        (
            ("model.overrides={ num_hidden_layers = 2.5 }",),
            "it must be an integer\n hint: for example 3",
        ),
        (("model.overrides={ model_type = 'gpt2' }",), "changes `model_type`"),
        (("model.config=missing",), "has no missing"),
        (("model.path=tiny-init",), "no checkpoint is read: `model.init` is random"),
        (("model.preset=gpt2",), "both set the config of the model"),
        (("model.init=checkpoint",), "`model.path` is missing"),
    ],
)
def test_random_start_error_names_the_fault(
    random_dir: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
):
    code = main(["train", "recipe.toml", *set_keys(*options)])
    assert code != OK
    assert message in capsys.readouterr().err
    assert not saved_steps(Path("runs/recipe"))


def test_random_start_without_a_tokenizer_names_the_key(
    random_dir: Path, capsys: pytest.CaptureFixture[str]
):
    make_checkpoint(Path("bare"), LLAMA)
    assert main(["train", "recipe.toml", "--set", "model.config=bare"]) == USAGE
    message = capsys.readouterr().err
    assert "`data.tokenizer` is missing" in message
    assert "set `data.tokenizer` to a tokenizer.json, or to a folder with one" in message


@pytest.mark.parametrize(
    ("name", "stored"), [("bpe.json", "tokenizer.json"), ("sp.model", "tokenizer.model")]
)
def test_steps_have_the_tokenizer_file_of_the_recipe_only(tmp_path: Path, name: str, stored: str):
    for file in (name, "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        (tmp_path / file).write_text(file)
    make_checkpoint(tmp_path / "llama", LLAMA)
    (tmp_path / "recipe.toml").write_text(RANDOM)
    overrides = [f"model.config={tmp_path}/llama", f"data.tokenizer={tmp_path}/{name}"]
    start = random_start(
        load_recipe(tmp_path / "recipe.toml", overrides).recipe, parse_mesh("1,1,1"), ()
    )
    copied = {file.path: Path(file.copied_from).name for file in start.small_files}
    assert copied == {f"hf/{stored}": name, "hf/chat_template.jinja": "chat_template.jinja"}


def test_plan_takes_the_config_of_a_random_start(
    random_dir: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert main(["plan", "recipe.toml", "--json"]) == OK
    output = capsys.readouterr()
    assert "shapes from tiny, random start" in output.err
    assert json.loads(output.out)["mesh"] == "1,2,4"


# Training of a model with added tokens, its export, and the removal of the tokens with their trained rows.

EMBEDDING = "params.embed.tokens"

TABLES = ("model.embed_tokens.weight", "lm_head.weight")

SHORT = ["train.steps=3", "checkpoint.every=3", "data.holdout=0"]


@pytest.fixture
def _tool_dir(work_dir: Path) -> None:
    Path("tokens.txt").write_text("<tool>\n")
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace(" w7 ", " <tool> "))


@pytest.mark.usefixtures("_tool_dir")
@pytest.mark.parametrize("is_init", slow_except([False, True], [False]))
def test_removal_after_training_names_lost_rows(
    capsys: pytest.CaptureFixture[str], *, is_init: bool
):
    prep.add_tokens("./tiny", "added", tokens="tokens.txt")
    start = "./added"
    if is_init:
        prep.save_init("./added", "start", pad_vocab="8", mesh="1,2,4")
        start = "start"
    prep.train("recipe.toml", overrides=[*SHORT, f'model.path="{start}"'])
    prep.export("runs/recipe", "exported")
    before = read_tensors(Path("added"))
    trained = read_tensors(Path("exported"))
    for name in TABLES:
        assert trained[name].shape == before[name].shape
        assert (trained[name][len(WORDS)] != before[name][len(WORDS)]).any()

    capsys.readouterr()
    assert main(["remove-tokens", "./exported", "--out", "removed"]) == 0
    messages = capsys.readouterr().err
    assert "1 token removed: id 131" in messages
    assert "their rows are dropped, also where training changed them" in messages
    removed = read_tensors(Path("removed"))
    assert removed.keys() == trained.keys()
    for name, array in trained.items():
        kept = array[: len(WORDS)] if name in TABLES else array
        assert np.array_equal(removed[name], kept), name
    tokenizer = Path("removed/tokenizer.json").read_bytes()
    assert tokenizer == Path("tiny/tokenizer.json").read_bytes()
    assert json.loads(Path("removed/config.json").read_text())["vocab_size"] == len(WORDS)


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Restore a training step with Orbax, by the dotted name of each leaf."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree: Mapping[str, Any] = checkpointer.restore((folder / "state").absolute())
    return dict(_iter_leaves(tree, ""))


def _iter_leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", np.asarray(value)


@pytest.mark.usefixtures("_tool_dir")
def test_training_step_gets_rows_without_moments():
    Path("tokens.txt").write_text("w3_w5\n<tool>\n")
    settings = json.loads(Path("tiny/tokenizer.json").read_text())
    settings["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"[_\s]"},
        "behavior": "Removed",
        "invert": False,
    }
    Path("tiny/tokenizer.json").write_text(json.dumps(settings))
    prep.save_init("tiny", "start", pad_vocab="8", mesh="1,2,4")
    overrides = [*SHORT, 'model.path="start"', "optimizer.ema=0.9", 'mesh="1,2,4"']
    prep.train("recipe.toml", overrides=overrides)
    run_ok("add-tokens", "runs/recipe", "--tokens", "tokens.txt", "--out", "added")
    before = restore(Path("runs/recipe/3"))
    added = restore(Path("added"))
    assert added.keys() == before.keys()
    size = len(WORDS)
    changed: set[str] = set()
    for name, old in before.items():
        new = added[name]
        if not name.endswith(("embed.tokens", "head.weight")):
            assert new.tobytes() == old.tobytes()
            continue
        changed.add(name)
        assert np.array_equal(new[:size], old[:size]), name
        assert not new[size + 2 :].any()
        if name.startswith("params.") or ".ema." in name:
            mean = old[[3, 5]].astype(np.float64).mean(axis=0).astype(np.float32)
            assert np.array_equal(new[size], mean), name
        else:
            assert not new[size:].any(), name
    assert len(changed) == 8
    assert changed >= {EMBEDDING, "opt_state.ema.head.weight"}
    run_ok("verify", "added", "--chain")

    run_ok("remove-tokens", "added", "--out", "removed")
    removed = restore(Path("removed"))
    for name, leaf in before.items():
        assert removed[name].tobytes() == leaf.tobytes(), name
    run_ok("verify", "removed", "--chain")


@pytest.mark.usefixtures("_tool_dir")
def test_factored_moments_are_refused(capsys: pytest.CaptureFixture[str]):
    prep.save_init("tiny", "start", pad_vocab="8", mesh="1,2,4")
    factored = ["optimizer.type=adafactor", "optimizer.min_factored_size=8"]
    prep.train("recipe.toml", overrides=[*SHORT, 'model.path="start"', *factored])
    code, lines = run_failing_unchanged(
        capsys, "add-tokens", "runs/recipe", "--tokens", "tokens.txt"
    )
    assert code == USAGE
    assert "the optimizer state of runs/recipe" in lines[0]
    assert "prep reshard runs/recipe --params-only" in " ".join(lines)


# Training from the init of a quantised model: scales are not read, and exports have the trained values.

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def test_trained_init_of_fp8_is_exported_with_its_values():
    values = make_quantized(Path("m"), "fp8")
    write_tokenizer(Path("m"))
    shutil.rmtree("tiny-init")
    prep.save_init("./m", "tiny-init", quantized="dequantize", pad_vocab="8", mesh="1,2,4")
    prep.train("recipe.toml", overrides=["train.steps=3", "checkpoint.every=3", "data.holdout=0"])
    step = json.loads(Path("runs/recipe/3/prep-manifest.json").read_text())
    assert "quantized" not in step
    assert not any("quantization" in name for name in step["others"])
    prep.export("runs/recipe", "exported")
    tensors = read_tensors(Path("exported"))
    assert {*tensors} == {*values}
    trained = tensors[Q_PROJ].astype(np.float32)
    assert trained.shape == values[Q_PROJ].shape
    assert 0 < np.abs(trained - values[Q_PROJ]).max() < 0.1
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())


def test_left_over_settings_do_not_refuse_training(capsys: pytest.CaptureFixture[str]):
    config_path = Path("tiny/config.json")
    config = json.loads(config_path.read_text())
    settings = {"quantization_config": {"quant_method": "fp8"}}
    config_path.write_text(json.dumps({**config, **settings}))
    run = ["train", "recipe.toml", *set_keys('model.path="./tiny"', "train.steps=3")]
    assert main([*run, "--set", "data.holdout=0"]) == OK
    remark = "the quantisation in config.json is ignored: no tensor is quantised"
    assert capsys.readouterr().err.count(remark) == 1
    prep.export("runs/recipe", "exported")
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())
