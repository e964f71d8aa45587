"""`prep train` with random initial parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, USAGE
from prepcli.formats.manifest import saved_steps
from prepcli.models.mesh import parse_mesh
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import RECIPE, make_training_folder, write_tokenizer
from trainer.recipe import load_recipe
from trainer.run.start import random_start

RANDOM = RECIPE.replace(
    'path = "tiny-init"',
    'init = "random"\nconfig = "tiny"\noverrides = { num_hidden_layers = 2, vocab_size = 133 }',
)


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    Path("recipe.toml").write_text(RANDOM)
    return tmp_path


def export_run(recipe_options: tuple[str, ...], out: str) -> dict[str, np.ndarray]:
    run_ok("train", "recipe.toml", "--out", f"run-{out}", *recipe_options)
    run_ok("export", f"run-{out}", "--out", out)
    return read_tensors(Path(out))


def test_random_start_trains_resumes_and_exports(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    tensors = export_run((), "whole")
    assert json.loads(Path("whole/config.json").read_text())["num_hidden_layers"] == 2
    assert tensors["model.embed_tokens.weight"].shape[0] == 133
    assert Path("whole/tokenizer.json").exists()
    assert main(["train", "recipe.toml", "--out", "run-parts", "-q", "--stop-after", "5"]) != OK
    resumed = export_run((), "parts")
    assert all(np.array_equal(tensors[name], resumed[name]) for name in tensors)
    run_ok("verify", "whole", "run-whole")


@pytest.mark.slow  # test_param_rounding compares random parameters of two meshes
def test_random_start_does_not_depend_on_the_mesh(work_dir: Path):
    one_step = set_keys("train.steps=1", "optimizer.lr=1e-30", "optimizer.warmup_steps=0")
    meshes = {"split": "1,2,4", "whole": "8,1,1"}
    starts = [export_run((*one_step, "--set", f"mesh={mesh}"), out) for out, mesh in meshes.items()]
    assert all(np.array_equal(starts[0][name], starts[1][name]) for name in starts[0])
    seeded = export_run((*one_step, "--set", "seed=4"), "seeded")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(starts[0][name], seeded[name])


# By default test_presets reads each preset, and test_random_start_trains_resumes_and_exports trains.
@pytest.mark.slow
def test_random_start_from_a_preset_reads_the_named_tokenizer(work_dir: Path):
    Path("tokens").mkdir()
    write_tokenizer(Path("tokens"))
    small = "{ n_embd = 32, n_layer = 2, n_head = 4, n_positions = 16, vocab_size = 131, eos_token_id = 0 }"
    Path("recipe.toml").write_text(
        RECIPE.replace('path = "tiny-init"', 'init = "random"\npreset = "gpt2"')
    )
    tensors = export_run(
        set_keys("data.tokenizer=tokens", f"model.overrides={small}"), "gpt2-small"
    )
    assert tensors["transformer.wte.weight"].shape == (131, 32)
    assert Path("gpt2-small/tokenizer.json").exists()


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
    work_dir: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
):
    code = main(["train", "recipe.toml", *set_keys(*options)])
    assert code != OK
    assert message in capsys.readouterr().err
    assert not saved_steps(Path("runs/recipe"))


def test_random_start_without_a_tokenizer_names_the_key(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
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
    make_checkpoint(tmp_path / "tiny", LLAMA)
    (tmp_path / "recipe.toml").write_text(RANDOM)
    overrides = [f"model.config={tmp_path}/tiny", f"data.tokenizer={tmp_path}/{name}"]
    start = random_start(
        load_recipe(tmp_path / "recipe.toml", overrides).recipe, parse_mesh("1,1,1"), ()
    )
    copied = {file.path: Path(file.copied_from).name for file in start.small_files}
    assert copied == {f"hf/{stored}": name, "hf/chat_template.jinja": "chat_template.jinja"}


def test_plan_takes_the_config_of_a_random_start(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert main(["plan", "recipe.toml", "--json"]) == OK
    output = capsys.readouterr()
    assert "shapes from tiny, random start" in output.err
    assert json.loads(output.out)["mesh"] == "1,2,4"
