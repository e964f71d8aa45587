"""Training states of Trainer in other forms: FSDP, tied heads, other weight decay, and invalid ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.cli.main import main
from prepcli.restore.item_reader import open_reader
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.object_server import serve_objects
from tests.helpers.run_cli import error_lines, run_failing, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_states import read_leaves
from trainer.models.module_order import optimizer_groups

torch = lazy_module("torch")

STEP = 5
State = dict[str, Any]
Change = Callable[[State], object]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Write the model `tiny` with a trainer_state.json, and return a state of AdamW for it."""
    monkeypatch.chdir(tmp_path)
    shapes = {name: t.shape for name, t in make_checkpoint(Path("tiny"), LLAMA, "float32").items()}
    Path("tiny/trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    groups = optimizer_groups("llama", shapes)
    entries: dict[int, Any] = {}
    for number, name in enumerate(groups.numbered):
        moment = torch.full(tuple(shapes[name]), float(number))
        entries[number] = {
            "step": torch.tensor(float(STEP)),
            "exp_avg": moment,
            "exp_avg_sq": moment + 0.5,
        }
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    num_decayed = len(groups.decayed)
    return {
        "state": entries,
        "param_groups": [
            settings | {"weight_decay": 0.1, "params": list(range(num_decayed))},
            settings | {"weight_decay": 0.0, "params": list(range(num_decayed, len(entries)))},
        ],
    }


def import_state(state: State, out: str) -> None:
    """Write optimizer.pt and convert it."""
    torch.save(state, "tiny/optimizer.pt")
    run_ok("save-init", "tiny", "--training-state", "--out", out)


def moment_leaves(out: str) -> dict[str, np.ndarray]:
    """Return all leaves of a step."""
    with open_reader(Path(out)) as reader:
        return read_leaves(reader)


def left_out(out: str) -> list[str]:
    """Return the recorded parts without a counterpart."""
    return json.loads(Path(out, "prep-manifest.json").read_text())["training_state"]["left_out"]


def test_names_of_fsdp_are_read(state: State):
    """FSDP saves the names of the parameters in place of numbers, in any order."""
    import_state(state, "numbered")
    names = optimizer_groups("llama", make_checkpoint(Path("again"), LLAMA, "float32")).numbered
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in reversed(group["params"])]
    state["state"] = {names[number]: entry for number, entry in state["state"].items()}
    import_state(state, "named")
    numbered = moment_leaves("numbered")
    named = moment_leaves("named")
    assert named.keys() == numbered.keys()
    assert all(np.array_equal(named[name], numbered[name]) for name in named)


def test_stored_tied_head_needs_no_moments(state: State):
    """PyTorch files have a tied head twice."""
    config = json.loads(Path("tiny/config.json").read_text())
    Path("tiny/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    arrays = make_checkpoint(Path("again"), LLAMA, "float32")
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for path in Path("tiny").glob("*.safetensors*"):
        path.unlink()
    torch.save(tensors, "tiny/pytorch_model.bin")
    names = optimizer_groups("llama", tensors).numbered
    head = names.index("lm_head.weight")
    del state["state"][head]
    state["state"] = dict(enumerate(state["state"].values()))
    num_decayed = len(state["param_groups"][0]["params"]) - 1
    state["param_groups"][0]["params"] = list(range(num_decayed))
    state["param_groups"][1]["params"] = list(range(num_decayed, len(state["state"])))
    import_state(state, "tied")
    leaves = moment_leaves("tied")
    assert "opt_state.adam.mu.embed.tokens" in leaves
    assert not any("head" in name for name in leaves)


def test_other_weight_decay_is_named(state: State):
    import_state(state, "as-trainer")
    assert left_out("as-trainer") == []
    state["param_groups"][1]["weight_decay"] = 0.1
    import_state(state, "everything")
    (entry,) = left_out("everything")
    assert entry.startswith("weight decay of 7 parameters, e.g. model.layers.0.input_layernorm")


def test_step_number_of_trainer_is_not_copied(state: State):
    import_state(state, "out")
    assert not Path("out/hf/trainer_state.json").exists()


def set_groups(**fields: Any) -> Change:
    """Return the change of fields in both groups."""
    return lambda state: [group.update(fields) for group in state["param_groups"]]


def set_tensor_lr(state: State) -> None:
    set_groups(lr=torch.tensor(1e-3))(state)


def set_steps(value: Any) -> Change:
    """Return the change of the number of updates of all parameters."""
    return lambda state: [
        entry.update(step=torch.tensor(value)) for entry in state["state"].values()
    ]


INVALID: dict[str, tuple[Change, str]] = {
    "no groups": (lambda state: state.update(param_groups=[1]), "is no state of an optimizer"),
    "no parameters": (set_groups(params=None), "is no state of an optimizer"),
    "no betas": (set_groups(betas=None), "b1 is not a number"),
    "three betas": (set_groups(betas=(0.9, 0.9, 0.9)), "b1 is not a number"),
    "tensor lr": (set_tensor_lr, "lr is not a number"),
    "amsgrad": (set_groups(amsgrad=True), "amsgrad is set"),
    "Adam": (set_groups(decoupled_weight_decay=False), "part of the gradient"),
    "other eps": (
        lambda state: state["param_groups"][1].update(eps=1e-6),
        "eps is 1e-08 and 1e-06",
    ),
    "step nan": (set_steps(math.nan), "nan updates"),
    "step inf": (set_steps(math.inf), "inf updates"),
    "half a step": (set_steps(2.5), "2.5 updates"),
    "large step": (set_steps(1e12), "1e+12 updates"),
    "two steps": (set_steps([0.0, 0.0]), "must have one element"),
    "no step": (set_steps([]), "must have one element"),
    "unused entry": (lambda state: state["state"].update({99: {}}), "has the key 99"),
    "integers": (
        lambda state: state["state"][0].update(exp_avg=state["state"][0]["exp_avg"].long()),
        "is int64, and must be a float",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_states_are_errors(state: State, capsys, name: str):
    change, message = INVALID[name]
    change(state)
    torch.save(state, "tiny/optimizer.pt")
    lines = error_lines(capsys, "save-init", "tiny", "--training-state", "--out", "never")
    assert message in " ".join(lines)
    assert not Path("never").exists()


@pytest.mark.parametrize("step", [True, -1, 1 << 31, "5", None])
def test_invalid_step_of_trainer_is_an_error(state: State, capsys, step: object):
    torch.save(state, "tiny/optimizer.pt")
    Path("tiny/trainer_state.json").write_text(json.dumps({"global_step": step}))
    lines = error_lines(capsys, "save-init", "tiny", "--training-state", "--out", "never")
    assert "trainer_state.json is broken" in lines[0]


def test_long_log_of_trainer_is_read(state: State):
    """A trainer_state.json of 100,000 logged steps has more than 16 MiB."""
    log = [{"loss": 1.0, "text": "x" * 4096}] * 5000
    Path("tiny/trainer_state.json").write_text(
        json.dumps({"global_step": STEP, "log_history": log})
    )
    import_state(state, "out")
    assert json.loads(Path("out/prep-manifest.json").read_text())["step"] == STEP


def test_export_in_a_bucket_is_read_without_its_state(state: State, monkeypatch, capsys):
    import_state(state, "step")
    with serve_objects() as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        run_ok("export", "step", "--training-state", "--out", "gs://bucket/out")
        capsys.readouterr()
        assert main(["verify", "gs://bucket/out"]) == 0
        assert "the training state of gs://bucket/out is not read" in capsys.readouterr().err
        run_ok("save-init", "gs://bucket/out", "--out", "parameters")
        arguments = ("save-init", "gs://bucket/out", "--training-state", "--out", "never")
        assert "is not supported for gs://bucket/out" in run_failing(capsys, 2, *arguments)
