"""Training moves between prep, a plain loop of PyTorch, and MaxText, also through a bucket."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from prepcli.commands.cli.main import main
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.other_trainers import (
    BATCH,
    HALF,
    ROUNDING,
    SEQ_LENGTH,
    SETTINGS,
    STEPS,
    TorchTraining,
    make_folder,
    relative_rate,
    token_ids,
    train,
    train_elsewhere,
)
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    error_lines,
    exported_tensors,
    run_json,
    run_ok,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, assert_same
from tests.helpers.training_states import same_state, step_leaves

torch = lazy_module("torch")
transformers = lazy_module("transformers")


@pytest.fixture(scope="module")
def torch_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in PyTorch to the middle, and move the state to prep and back."""
    path = tmp_path_factory.mktemp("pair")
    with contextlib.chdir(path):
        make_folder()
        training = TorchTraining("tiny")
        training.train(1, HALF)
        training.save("torch")
        run_ok("save-init", "torch", "--training-state", "--config", "tiny", "--pad-vocab", "8",
               "--mesh", "1,2,4", "--out", "from-torch")  # fmt: skip
        run_ok("export", "from-torch", "--training-state", "--format", "dcp", "--out", "back")
    return path


@pytest.fixture
def torch_folder(torch_runs: Path, monkeypatch: MonkeyPatch) -> None:
    """Work in the folder of the trained runs."""
    monkeypatch.chdir(torch_runs)


def test_round_trip_changes_no_bit(torch_folder: None):
    """PyTorch loads the keys, settings and moments of its own state."""
    run_ok("verify", "back", "from-torch")
    original = TorchTraining("tiny")
    original.load("torch")
    back = TorchTraining("tiny")
    back.load("back")
    loaded = back.optimizer.state_dict()
    trained = original.optimizer.state_dict()
    assert loaded["param_groups"] == [
        group | {"initial_lr": SETTINGS["lr"]} for group in trained["param_groups"]
    ]
    assert loaded["state"].keys() == trained["state"].keys()
    for number, entry in loaded["state"].items():
        assert entry.keys() == trained["state"][number].keys()
        assert all(torch.equal(entry[name], trained["state"][number][name]) for name in entry)
        assert entry["step"].item() == HALF


def test_verify_finds_changed_moments_and_settings(torch_folder: None):
    for number in range(2):
        shutil.copytree("back", f"damaged-{number}")
        path = Path(f"damaged-{number}/__0_{number}.distcp")
        content = bytearray(path.read_bytes())
        content[-2000 if number else len(content) // 2] ^= 1
        path.write_bytes(content)
        assert main(["verify", f"damaged-{number}"]) == 1


def left_out(out: str) -> list[str]:
    """Return the recorded parts without a counterpart."""
    return json.loads(Path(out, "prep-manifest.json").read_text())["training_state"]["left_out"]


def test_parts_without_a_counterpart_are_named(torch_folder: None):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    zeros = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(4.0)}
    state = {
        "model": model,
        "optimizer": optimizer | {"acc_grads": torch.zeros(3)},
        "scheduler": training.schedule.state_dict(),
        "ema": {"embed_tokens": torch.zeros(3), "norm": torch.zeros(3)},
    }
    state["optimizer"]["state"]["value_head.weight"] = zeros
    save(state, checkpoint_id="scheduled")
    words = ("--training-state", "--config", "tiny", "--out", "scheduled-step")
    run_ok("save-init", "scheduled", *words)
    assert sorted(left_out("scheduled-step")) == [
        "ema",
        "optimizer.acc_grads",
        "optimizer.state.value_head.weight",
        "scheduler",
    ]
    assert left_out("back") == ["the state of a scheduler", "random state"]


def test_state_of_amsgrad_is_refused(torch_folder: None, capsys):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    states: Any = optimizer["state"]
    first = next(iter(states.values()))
    first["max_exp_avg_sq"] = first["exp_avg_sq"].clone()
    save({"model": model, "optimizer": optimizer}, checkpoint_id="amsgrad")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "amsgrad", "--training-state", "--config", "tiny",
                        "--out", "never")  # fmt: skip
    assert "amsgrad has no state of AdamW" in lines[0]
    assert "max_exp_avg_sq" in lines[1]


def test_import_without_state_reads_the_model(torch_folder: None):
    run_ok("save-init", "torch", "--config", "tiny", "--out", "model-only")
    run_ok("verify", "model-only", "from-torch")
    training = TorchTraining("tiny")
    training.load("torch")
    expected = {name: tensor.numpy() for name, tensor in training.model.state_dict().items()}
    assert_same(exported_tensors("model-only"), expected)


@pytest.mark.slow
def test_keys_of_the_tutorial_of_pytorch_are_read(torch_folder: None):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    save({"model": model, "optim": optimizer}, checkpoint_id="tutorial")
    words = ("--training-state", "--config", "tiny", "--out", "tutorial-state")
    run_ok("save-init", "tutorial", *words)
    words = ("--training-state", "--format", "dcp", "--out", "tutorial-back")
    run_ok("export", "tutorial-state", *words)
    run_ok("verify", "tutorial-back", "back")


def test_model_of_the_tutorial_is_read_without_its_optimizer(torch_folder: None):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    save({"app": {"model": get_model_state_dict(training.model)}}, checkpoint_id="model-of-app")
    run_ok("save-init", "model-of-app", "--config", "tiny", "--out", "app-init")
    run_ok("verify", "app-init", "from-torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "torchtitan"), "error: `--training-state` is not supported for torchtitan"),
        (("--format", "dcp"), "dcp has no training state"),
    ],
)
def test_export_without_moments_is_refused(
    options: tuple[str, str], message: str, torch_folder: None, capsys
):
    out = options[1]
    run_ok("export", "from-torch", *options, "--out", out)
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", out, "--training-state", "--out", "never")
    assert message in lines[0]


# Training moves between prep and MaxText: Orbax restores the state of optax, and MaxText itself continues it


# MaxText does not scale the queries of Qwen3, so that its steps are those of prep.
QWEN3 = FAMILY_CONFIGS["qwen3"] | {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
# optax in MaxText decays all parameters, and prep no norms.
NO_DECAY = "optimizer.weight_decay=0.0"


@pytest.fixture(scope="module")
def maxtext_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a LLaMA with heads of 16 elements to the middle of the run. MaxText divides its queries by 4."""
    path = tmp_path_factory.mktemp("maxtext")
    with contextlib.chdir(path):
        make_folder(LLAMA | {"num_attention_heads": 4, "hidden_size": 64})
        train("half", stop_after=HALF)
        run_ok("export", "half", "--training-state", "--layout", "maxtext", "--out", "maxtext")
    return path


@pytest.fixture
def maxtext_folder(maxtext_runs: Path, monkeypatch: MonkeyPatch) -> None:
    """Work in the folder of the trained runs."""
    monkeypatch.chdir(maxtext_runs)


def restore_optax(item: Path) -> tuple[dict[str, Any], Any]:
    """Restore an item with Orbax into the state of `optax.adamw`, and return the parameters and that state."""
    checkpointer = ocp.PyTreeCheckpointer()
    stored = checkpointer.restore(item)
    params = stored["params"]
    target = {
        "params": params,
        "step": stored["step"],
        "opt_state": optax.adamw(optax.constant_schedule(1e-3)).init(params),
    }
    restored = checkpointer.restore(item, item=target)
    return restored["params"]["params"], restored["opt_state"]


def read_moments(source: str) -> dict[int, dict[str, Any]]:
    """Export a training state for Trainer, and read its moments with PyTorch, by the number of the parameter."""
    run_ok("export", source, "--training-state", "--out", "for-trainer", "--overwrite")
    return torch.load("for-trainer/optimizer.pt", weights_only=True)["state"]


def test_orbax_restores_the_state_of_optax(maxtext_folder: None):
    params, (adam, decay, schedule) = restore_optax(Path(f"maxtext/{HALF}/items").absolute())
    assert int(adam.count) == int(schedule.count) == HALF
    assert decay == optax.EmptyState()
    state = read_moments("half")
    # Numbers in the order of the modules: the embedding, then 7 matrices per layer.
    for layer in range(LLAMA["num_hidden_layers"]):
        query = state[1 + 7 * layer]
        up = state[1 + 7 * layer + 5]
        moments: dict[str, Any] = {}
        for slot, tree in (("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
            layers = tree["params"]["decoder"]["layers"]
            # Layers are stacked on axis 1.
            moments[slot] = jax.tree.map(lambda leaf, index=layer: leaf[:, index], layers)
            kernel = moments[slot]["mlp"]["wi_1"]["kernel"]
            assert np.array_equal(kernel, up[slot].numpy().T)
        for slot, factor in (("exp_avg", 4), ("exp_avg_sq", 16)):
            kernel = np.asarray(moments[slot]["self_attention"]["query"]["kernel"])
            assert np.array_equal(kernel.reshape(64, 64), query[slot].numpy().T * factor)
    assert params["decoder"]["decoder_norm"]["scale"].shape == (64,)


def test_round_trip_with_maxtext_changes_no_bit(maxtext_folder: None):
    run_ok("verify", "maxtext")
    run_ok("verify", "maxtext", f"half/{HALF}")
    run_ok("save-init", "maxtext", "--training-state", "--pad-vocab", "8", "--out", "mt-back")
    run_ok("verify", "mt-back", f"half/{HALF}")
    assert same_state(step_leaves("mt-back"), step_leaves(f"half/{HALF}"))


def test_verify_finds_a_changed_count_of_the_schedule(maxtext_folder: None, capsys):
    """The last bytes of the item are this count. It gives the learning rate of the next step."""
    shutil.copytree("maxtext", "changed")
    data_files = Path("changed", str(HALF), "items", "d").iterdir()
    path = max(data_files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    assert content[-4:] == HALF.to_bytes(4, "little")
    content[-1] ^= 1
    path.write_bytes(content)
    assert "changed is damaged" in error_lines(capsys, "verify", "changed")[0]


def test_parts_without_a_counterpart_in_maxtext_are_named(maxtext_folder: None):
    record = json.loads(Path("maxtext/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["random state", "settings of the optimizer"]
    shutil.copytree(Path("maxtext", str(HALF)), Path("by-maxtext", str(HALF)))
    shutil.rmtree(Path("by-maxtext", str(HALF), "items", "hf"))
    run_ok("save-init", "./by-maxtext", "--training-state", "--config", "tiny", "--out", "step")
    record = json.loads(Path("step/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["settings of the optimizer"]


def test_item_without_moments_is_refused(maxtext_folder: None, capsys):
    run_ok("export", "half", "--layout", "maxtext", "--out", "no-state")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "no-state", "--training-state", "--out", "never")
    assert "no-state has no moments of AdamW" in lines[0]


def continue_in_maxtext(item: str, name: str, **changes: Any) -> dict[int, float]:
    """Take steps in MaxText from an item, save the item NAME, and return the losses."""
    request = {
        "config": "tiny/config.json",
        "item": str(Path(item).absolute()),
        "layout": "maxtext",
        "has_state": True,
        "ids": "steps.npy",
        "first": HALF + 1,
        "last": STEPS,
        "rates": [SETTINGS["lr"] * relative_rate(step) for step in range(STEPS + 1)],
        "adam": {key: SETTINGS[key] for key in ("b1", "b2", "eps")} | {"weight_decay": 0.0},
    }
    return train_elsewhere("maxtext", name, request | changes)


@pytest.mark.slow
@pytest.mark.skipif("PREP_MAXTEXT_PYTHON" not in os.environ, reason="needs MaxText")
def test_maxtext_and_prep_continue_each_other(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(QWEN3)
    np.save("steps.npy", token_ids().reshape(STEPS, BATCH, SEQ_LENGTH))
    expected = train("full", NO_DECAY)
    later = {step: expected[step] for step in range(HALF + 1, STEPS + 1)}
    train("half", NO_DECAY, stop_after=HALF)
    run_ok("export", "half", "--training-state", "--layout", "maxtext", "--out", "out")
    losses = continue_in_maxtext(f"out/{HALF}/items", "from-prep")
    assert losses == pytest.approx(later, abs=2e-6)
    fresh = continue_in_maxtext(f"out/{HALF}/items", "fresh", has_state=False)
    assert max(abs(fresh[step] - later[step]) for step in later) > 5e-3
    run_ok("export", "tiny", "--layout", "maxtext", "--out", "start")
    continue_in_maxtext("start/0/items", "by-maxtext", has_state=False, first=1, last=HALF)
    run_ok("save-init", "by-maxtext", "--training-state", "--config", "tiny", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "back")  # fmt: skip
    losses = train(
        "continued", NO_DECAY, "model.path=back", "model.training_state=true", "data.tokenizer=tiny"
    )
    assert losses == pytest.approx(later, abs=2e-6)


# Training states in a bucket: written there and read from there, without a local copy of the tensors


@pytest.fixture
def store(monkeypatch: MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Serve an empty bucket."""
    with use_objects(monkeypatch) as store:
        yield store


WORDS = {
    "maxtext": ("--layout", "maxtext"),
    "levanter": ("--layout", "levanter"),
    "tunix": ("--layout", "tunix"),
    "trainer": (),
    "dcp": ("--format", "dcp"),
}


@pytest.mark.parametrize("trainer", slow_except(WORDS, ["levanter"]))
def test_state_of_another_trainer_is_read_from_a_bucket(
    maxtext_folder: None, store: FakeObjectStore, trainer: str, tmp_path: Path, capsys: Capture
):
    url = f"gs://bucket/{trainer}"
    report = run_json(capsys, "export", "half", "--training-state", *WORDS[trainer], "--out", url)
    assert report["next"] == f"prep verify {url} half"
    run_ok("verify", url, f"half/{HALF}")
    out = str(tmp_path / "back")
    words = ("--training-state", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", out)
    run_ok("save-init", url, *words)
    assert same_state(step_leaves(out), step_leaves(f"half/{HALF}"))


def test_state_of_a_run_is_exported_from_a_bucket(
    maxtext_folder: None, store: FakeObjectStore, tmp_path: Path
):
    for path in Path("half").rglob("*"):
        if path.is_file():
            store.store(f"bucket/{path.as_posix()}", path.read_bytes())
    for name, source in (("local", "half"), ("remote", "gs://bucket/half")):
        run_ok("export", source, "--training-state", "--out", str(tmp_path / name))
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


CONTINUE = ("model.path=from-torch", "data.tokenizer=tiny")


def largest_difference(losses: dict[int, float], expected: dict[int, float]) -> float:
    """Return the largest difference of losses after the middle of the run."""
    return max(abs(losses[step] - expected[step]) for step in range(HALF + 1, STEPS + 1))


@pytest.fixture(scope="module")
def prep_losses(torch_runs: Path) -> dict[int, float]:
    """Train in prep without a stop, and return the losses."""
    with contextlib.chdir(torch_runs):
        return train("full")


@pytest.fixture
def losses(prep_losses: dict[int, float], torch_folder: None) -> dict[int, float]:
    """Work in the folder of the trained runs, and return the losses of prep."""
    return prep_losses


@pytest.mark.slow
def test_prep_continues_a_run_of_torch(losses: dict[int, float]):
    continued = train("continued", *CONTINUE, "model.training_state=true")
    assert min(continued) == HALF + 1
    assert largest_difference(continued, losses) < ROUNDING
