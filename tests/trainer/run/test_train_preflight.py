"""Checks of `prep train` before it converts a model or tokenizes a text, and the report of a dry run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.formats.manifest import saved_steps
from prepcli.restore.weights_reader import WeightsReader
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.train_runs import set_keys, train_error, train_json
from tests.helpers.training_folder import RECIPE, WORDS, write_tokenizer
from trainer.data import files as data_files
from trainer.data import tokenize
from trainer.distributed import agreement
from trainer.run import machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a recipe, a text, a Hugging Face model and its init."""
    root = tmp_path_factory.mktemp("preflight")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_checkpoint(Path("tiny"), LLAMA)
        write_tokenizer(Path("tiny"))
        run_ok("save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4")
        Path("text.txt").write_text(" ".join(WORDS * 20))
        Path("recipe.toml").write_text(RECIPE)
    return root


@pytest.fixture(autouse=True)
def _work_dir(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Link the shared inputs into a new working folder."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _reads_nothing(monkeypatch: pytest.MonkeyPatch):
    """Fail if a text or a tensor of a Hugging Face folder is read."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("data or weights were read")

    monkeypatch.setattr(data_files, "hash_file", refuse)
    monkeypatch.setattr(tokenize, "make_shards", refuse)
    monkeypatch.setattr(WeightsReader, "read", refuse)


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize("model", ["tiny-init", "tiny"])
@pytest.mark.parametrize(
    ("sets", "code", "what"),
    [
        ("batch.accumulate=3", USAGE, "`batch.size` 8 is not a whole number of micro-batches"),
        ("data.path=nowhere.txt", FAILED, "no data in `nowhere.txt`"),
        ("data.tokenizer=nowhere", FAILED, "no tokenizer at nowhere"),
        ("model.rope_theta=0.5", USAGE, "`model.rope_theta` cannot be applied to this llama model"),
        (
            "model.overrides={ num_hidden_layers = 2 }",
            USAGE,
            "`model.overrides` changes the shape of layers.attn_norm.scale",
        ),
        (
            "model.overrides={ attention_bias = true }",
            USAGE,
            "`model.overrides` adds layers.attn.q.bias",
        ),
    ],
)
def test_invalid_recipe_is_found_before_work(
    model: str, sets: str, code: int, what: str, capsys: pytest.CaptureFixture[str]
):
    assert train_error(capsys, *set_keys(sets, f"model.path={model}"))[:2] == (code, what)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_reads_nothing")
def test_length_that_sp_does_not_divide_is_found_before_work(capsys: pytest.CaptureFixture[str]):
    sets = ("mesh=dp:2,sp:4", "model.attention_kernel=blockwise", "data.seq_length=12")
    error = train_error(capsys, *set_keys(*sets))
    assert error == (
        USAGE,
        "`data.seq_length` is 12: 12 tokens cannot be split over sp 4",
        "each device holds 2 equal blocks: 12 mod 8 = 4",
        "use a multiple of 8 tokens, or a mesh without sp",
    )


@pytest.mark.usefixtures("_reads_nothing")
def test_invalid_eval_path_is_found_before_work(capsys: pytest.CaptureFixture[str]):
    Path("other.toml").write_text(RECIPE.replace("holdout = 0.1", 'eval_path = "empty.txt"'))
    Path("empty.txt").touch()
    capsys.readouterr()
    assert main(["train", "other.toml", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["error"]["what"] == "empty.txt is empty"
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_reads_nothing")
def test_full_disk_is_found_before_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    code, what, *_ = train_error(capsys)
    assert (code, what) == (FAILED, "not enough room for a checkpoint in runs/recipe")


def test_eval_data_is_checked_before_training_data(capsys: pytest.CaptureFixture[str]):
    Path("other.toml").write_text(RECIPE.replace("holdout = 0.1", 'eval_path = "latin.txt"'))
    Path("latin.txt").write_bytes(b"w1 \xe9 w2")
    capsys.readouterr()
    assert main(["train", "other.toml"]) == FAILED
    stderr = capsys.readouterr().err
    assert "latin.txt is not UTF-8" in stderr
    assert "blocks of 16" not in stderr, "the training text was not tokenized"


def dry_run(capsys: pytest.CaptureFixture[str], *sets: str) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    words = set_keys(*sets)
    code = main(["train", "recipe.toml", "--dry-run", "--json", *words])
    out, err = capsys.readouterr()
    assert code == OK, out
    return json.loads(out), err


def test_dry_run_estimates_device_memory(capsys: pytest.CaptureFixture[str]):
    report, err = dry_run(capsys)
    assert (report["steps"], report["mesh"], report["dry_run"]) == (12, "1,2,4", True)
    memory = report["memory"]
    assert memory["scores"] == 4 * 2 * 16 * 16 * 4, "batch 4 x 2 heads x 16 x 16, float32"
    lasting = sum(memory[name] for name in ("parameters", "moments", "gradients", "batch", "saved"))
    assert memory["peak"] == lasting + max(memory["layer"], memory["head"])
    assert memory["fits"] is True
    assert "of it scores [4, 2, 16, 16]" in err
    assert "batch 8 x 16 = 128 tokens per step" in err
    assert report["warnings"] == []
    assert not Path("runs").exists()


def test_dry_run_has_tiles_and_head_chunks_for_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.training.setup.find_mismatch", lambda *_: "")
    report, err = dry_run(capsys, "data.seq_length=256")
    assert report["memory"]["scores"] == 4 * 2 * 64 * 64 * 4
    assert (
        "(auto: sequences of more than 255 tokens; no kernel for cpu), tiles of 64 queries x 64 keys\n"
        in err
    )
    assert "head and loss, 64 tokens" in err


def test_dry_run_names_the_kernel_and_its_reason(capsys: pytest.CaptureFixture[str]):
    report, err = dry_run(capsys)
    assert report["attention_kernel"] == "reference"
    assert "attention reference (auto: sequences of up to 255 tokens; no kernel for cpu)\n" in err
    report, err = dry_run(
        capsys, "model.attention_kernel=blockwise", "model.q_chunk_size=4", "model.k_chunk_size=8"
    )
    assert (report["attention_kernel"], report["memory"]["scores"]) == (
        "blockwise",
        4 * 2 * 4 * 8 * 4,
    )
    assert "attention blockwise (set by the recipe), tiles of 4 queries x 8 keys\n" in err


@pytest.mark.usefixtures("_reads_nothing")
def test_kernel_without_split_sequences_refuses_sp(capsys: pytest.CaptureFixture[str]):
    error = train_error(capsys, *set_keys("model.attention_kernel=reference", "mesh=sp:8"))
    assert error == (
        USAGE,
        "attention kernel `reference` cannot compute this model's attention",
        "it does not support sequences split over devices",
        '`model.attention_kernel = "auto"`',
    )


@pytest.mark.usefixtures("_reads_nothing")
def test_kernel_without_its_device_is_found_before_work(capsys: pytest.CaptureFixture[str]):
    code, what, why, hint = train_error(capsys, "--set", "model.attention_kernel=cudnn")
    assert (code, what) == (USAGE, "attention kernel `cudnn` cannot compute this model's attention")
    assert why.startswith("it runs on cuda, not on cpu; it does not support float32; ")
    assert hint == '`model.attention_kernel = "auto"`'


def limit_memory(monkeypatch: pytest.MonkeyPatch, device_nbytes: int) -> None:
    """Limit the memory of each of 8 devices."""
    monkeypatch.setattr("trainer.run.machine.host_memory", lambda: {"available": 8 * device_nbytes})


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize("model", ["tiny-init", "tiny"])
def test_step_larger_than_memory_is_refused_before_work(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    limit_memory(monkeypatch, 200 << 10)
    code, what, why, hint = train_error(capsys, *set_keys(f"model.path={model}", "batch.size=32"))
    assert (code, why) == (FAILED, "200 KiB are available")
    assert what.startswith("a step needs about ")
    assert hint.startswith("use more or larger devices, or a shorter `data.seq_length`; `--force`")
    assert not Path("runs").exists()


def test_processes_of_a_host_divide_its_memory_before_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise AssertionError("tensors were matched")

    report, _ = dry_run(capsys)
    limit_memory(monkeypatch, report["memory"]["peak"])
    assert dry_run(capsys)[0]["memory"]["fits"] is True
    monkeypatch.setattr(agreement, "processes_per_host", lambda group: 2)
    monkeypatch.setattr("trainer.run.start.open_source", refuse)
    code, what, *_ = train_error(capsys, "--set", "model.path=tiny")
    assert code == FAILED
    assert what.startswith("a step needs about ")


def test_force_warns_about_low_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    limit_memory(monkeypatch, 16 << 10)
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--dry-run", "--json", "--force"]) == OK
    report = json.loads(capsys.readouterr().out)
    (warning,) = report["warnings"]
    assert warning.startswith("a step needs about ")
    assert warning.endswith(
        "16.0 KiB are available: use more or larger devices, or a shorter `data.seq_length`"
    )
    assert report["memory"]["fits"] is False


def test_dry_run_shows_the_estimate_of_a_refused_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    limit_memory(monkeypatch, 16 << 10)
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--dry-run"]) == FAILED
    assert "memory of one device, estimated" in capsys.readouterr().err


def test_dry_run_warns_about_lengths_and_epochs(capsys: pytest.CaptureFixture[str]):
    report, _ = dry_run(capsys, "data.seq_length=128", "batch.size=64", "train.steps=10000")
    context, batch, epochs = report["warnings"]
    assert (
        context
        == "`data.seq_length` is 128, and the model was made for 64 positions; `model.rope_scaling` extends them"
    )
    assert batch == "a batch of 64 takes sequences more than once: the data has 18"
    assert epochs == "10,000 steps are 35,556 epochs of 18 sequences"


def test_start_warns_like_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The start is stopped before it creates the run's folder."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.run.train.load_state", stop)
    capsys.readouterr()
    code, report = train_json(capsys, "--set", "checkpoint.every=500")
    assert (code, report["error"]["what"]) == (130, "interrupted")
    assert report["error"]["why"] == "kept in runs/recipe: the tokens"
    assert main(["train", "recipe.toml", "--set", "checkpoint.every=500"]) == 130
    assert "`checkpoint.every` is 500, but the run has 12 steps" in capsys.readouterr().err
    assert not saved_steps(Path("runs/recipe"))


@pytest.mark.parametrize("command", ["train", "tokenize"])
def test_model_without_a_config_leads_to_a_conversion(
    command: str, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(Path("tiny").resolve(), "bare")
    Path("bare/config.json").unlink()
    assert run_code(command, "recipe.toml", "--set", "model.path=./bare") == FAILED
    error = capsys.readouterr().err
    assert "`prep save-init ./bare --config FOLDER`, and name its output in `model.path`" in error


def test_page_of_a_dataset_leads_to_its_name_in_recipes(capsys: pytest.CaptureFixture[str]):
    page = "https://huggingface.co/datasets/owner/name/tree/v1/en"
    assert run_code("train", "recipe.toml", "--set", f"data.path={page}") == USAGE
    assert "`hf://datasets/owner/name@v1/en`" in capsys.readouterr().err
