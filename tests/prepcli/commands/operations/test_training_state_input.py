"""Training states of Trainer in other forms: FSDP, tied heads, other weight decay, and invalid ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.options import ExportOptions, SaveInitOptions
from prepcli.commands.operations.training_state import check_imported_state, check_state_request
from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.models.module_order import optimizer_groups
from prepcli.restore.item_reader import open_reader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import Source, Wrapper
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.object_server import use_objects
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_states import read_leaves

torch = lazy_module("torch")

STEP = 5
State = dict[str, Any]
Change = Callable[[State], object]


@pytest.fixture
def state() -> State:
    """Write the model `tiny` with a trainer_state.json, and return a state of AdamW for it."""
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


def test_state_of_trainer_is_read_from_a_bucket(state: State, monkeypatch, capsys):
    import_state(state, "step")
    uploaded: dict[str, bytes] = {}
    for path in Path("tiny").iterdir():
        uploaded[f"bucket/tiny/{path.name}"] = path.read_bytes()
    with use_objects(monkeypatch, uploaded) as store:
        run_ok("save-init", "gs://bucket/tiny", "--training-state", "--out", "streamed")
        run_ok("export", "step", "--training-state", "--out", "gs://bucket/out")
        run_ok("verify", "gs://bucket/out", "step")
        # The optimizer is in one file with the moments of all layers.
        key = "bucket/out/optimizer.pt"
        content = bytearray(store.objects[key])
        moment = state["state"][3]["exp_avg"].numpy().tobytes()
        content[content.index(moment)] ^= 1
        store.store(key, bytes(content))
        capsys.readouterr()
        assert main(["verify", "gs://bucket/out"]) == 1
    streamed = moment_leaves("streamed")
    local = moment_leaves("step")
    assert all(np.array_equal(streamed[name], local[name]) for name in local)


def test_uneven_vocabulary_is_padded_with_its_moments(state: State, capsys):
    """`prep pad-vocab` would write the parameters without their moments."""
    torch.save(state, "tiny/optimizer.pt")
    arguments = ("save-init", "tiny", "--training-state", "--mesh", "1,1,4")
    lines = " ".join(error_lines(capsys, *arguments, "--out", "never"))
    assert "vocabulary 131 cannot be split" in lines
    assert "prep pad-vocab" not in lines
    run_ok(*arguments, "--pad-vocab", "auto", "--out", "padded")
    assert len(moment_leaves("padded")["opt_state.adam.mu.embed.tokens"]) == 132


def multimodal_source(name: str, *, training_state: bool) -> Source:
    """Open a checkpoint, and declare it a part of a multimodal model."""
    source = open_source(locate(name), training_state=training_state)
    return replace(source, wrapper=Wrapper({"model_type": "llava"}, source.config))


def test_export_of_a_multimodal_state_proposes_the_text_part(state: State):
    import_state(state, "step")
    source = multimodal_source("step", training_state=False)
    with pytest.raises(UsageError, match="not supported for multimodal models") as caught:
        check_state_request(with_defaults(ExportOptions, {}), source)
    assert caught.value.hint == "`--text-only` leaves them out"


def test_import_of_a_multimodal_state_is_refused(state: State):
    torch.save(state, "tiny/optimizer.pt")
    source = multimodal_source("./tiny", training_state=True)
    with pytest.raises(UsageError, match="not supported for multimodal models"):
        check_imported_state(with_defaults(SaveInitOptions, {}), source)
