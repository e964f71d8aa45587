"""Training moves between prep and transformers' Trainer, with equal losses, and invalid states are refused."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.options import ExportOptions, SaveInitOptions
from prepcli.commands.operations.training_state import (
    check_imported_state,
    check_state_request,
    read_training_state,
)
from prepcli.core.errors import DamagedError, UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.models.module_order import optimizer_groups
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import Source, Wrapper
from tests.helpers.damage import flip_bit
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.other_trainers import (
    HALF,
    ROUNDING,
    SETTINGS,
    STEPS,
    HFTraining,
    make_folder,
    train,
)
from tests.helpers.run_cli import MonkeyPatch, error_lines, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_states import step_leaves

torch = lazy_module("torch")
transformers = lazy_module("transformers")


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Train in prep and with Trainer, with a step in the middle. Return the losses of prep."""
    path = tmp_path_factory.mktemp("pair")
    with contextlib.chdir(path):
        make_folder()
        losses = train("full", f"checkpoint.every={HALF}")
        run_ok("export", "full", "--step", str(HALF), "--training-state", "--out", "checkpoint-4")
        HFTraining("tiny", "hf").train()
        run_ok("save-init", "hf/checkpoint-4", "--training-state", "--pad-vocab", "8",
               "--mesh", "1,2,4", "--out", "from-hf")  # fmt: skip
    return path, losses


@pytest.fixture
def folder(
    trained_pair: tuple[Path, dict[int, float]], monkeypatch: MonkeyPatch
) -> dict[int, float]:
    """Work in the folder of the trained runs, and return the losses of prep."""
    path, losses = trained_pair
    monkeypatch.chdir(path)
    return losses


def differences(losses: dict[int, float], expected: dict[int, float]) -> list[float]:
    """Return the differences of losses after the middle of the run."""
    steps = range(HALF + 1, STEPS + 1)
    return [abs(losses[step] - expected[step]) for step in steps]


def test_trainer_resumes_a_run_of_prep(folder: dict[int, float]):
    resumed = HFTraining("checkpoint-4", "hf-resumed").train("checkpoint-4")
    assert list(resumed) == list(range(HALF + 1, STEPS + 1))
    assert max(differences(resumed, folder)) < ROUNDING


def test_prep_continues_a_run_of_trainer(folder: dict[int, float]):
    losses = train("continued", "model.path=from-hf", "model.training_state=true", "data.tokenizer=tiny")  # fmt: skip
    assert min(losses) == HALF + 1
    assert max(differences(losses, folder)) < ROUNDING


def test_cast_moments_are_named(folder: dict[int, float], capsys):
    overrides = ("model.path=from-hf", "model.training_state=true", "data.tokenizer=tiny")
    arguments = ["train", "recipe.toml", "--out", "cast", "--dry-run"]
    for override in (*overrides, 'optimizer.moment_dtype="bfloat16"'):
        arguments += ["--set", override]
    assert main(arguments) == 0
    warning = "24 leaves of from-hf are cast, e.g. opt_state.adam.mu.embed.tokens from float32 to bfloat16"
    assert warning in " ".join(capsys.readouterr().err.split())


def test_moments_have_the_bits_of_the_run(folder: dict[int, float]):
    state = torch.load("checkpoint-4/optimizer.pt", weights_only=True)
    # The first parameter of `named_parameters` is the embedding. Its padding is taken off.
    leaves = step_leaves(f"full/{HALF}")
    for entry, slot in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        stored = leaves[f"opt_state.adam.{slot}.embed.tokens"][:131]
        assert state["state"][0][entry].numpy().tobytes() == stored.tobytes()
    assert state["state"][0]["step"].item() == HALF


def test_settings_equal_those_that_trainer_writes(folder: dict[int, float]):
    ours = torch.load("checkpoint-4/optimizer.pt", weights_only=True)["param_groups"]
    theirs = torch.load("hf/checkpoint-4/optimizer.pt", weights_only=True)["param_groups"]
    for own, other in zip(ours, theirs, strict=True):
        # The implementation is a choice of the machine.
        assert own | {"fused": True} == other
    ours = torch.load("checkpoint-4/scheduler.pt", weights_only=True)
    assert ours == torch.load("hf/checkpoint-4/scheduler.pt", weights_only=True)


def test_round_trip_changes_no_bit(folder: dict[int, float]):
    run_ok("export", "from-hf", "--training-state", "--out", "back")
    run_ok("verify", "back", "from-hf")
    ours = torch.load("back/optimizer.pt", weights_only=True)["state"]
    theirs = torch.load("hf/checkpoint-4/optimizer.pt", weights_only=True)["state"]
    assert ours.keys() == theirs.keys()
    for number, entry in ours.items():
        for name, tensor in entry.items():
            assert torch.equal(tensor, theirs[number][name])
    run_ok("save-init", "checkpoint-4", "--training-state", "--pad-vocab", "8", "--out", "again")
    run_ok("verify", "again", f"full/{HALF}")


def test_verify_finds_a_changed_moment(folder: dict[int, float], capsys):
    shutil.copytree("checkpoint-4", "damaged")
    path = Path("damaged/optimizer.pt")
    moment = torch.load(path, weights_only=True)["state"][3]["exp_avg"].numpy().tobytes()
    flip_bit(path, path.read_bytes().index(moment))
    assert main(["verify", "damaged"]) == 1
    out, err = capsys.readouterr()
    assert "opt_state.adam.mu" in out + err


def test_manifest_names_what_is_not_converted(folder: dict[int, float]):
    record = json.loads(Path("from-hf/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["rng_state.pth", "training_args.bin", "scheduler.pt"]
    assert record["optimizer"] | SETTINGS == record["optimizer"] | {"lr": SETTINGS["lr"]}


def test_missing_moments_of_an_export_are_damage(folder: dict[int, float], capsys):
    shutil.copytree("checkpoint-4", "no-optimizer")
    Path("no-optimizer/optimizer.pt").unlink()
    assert "no-optimizer is damaged" in error_lines(capsys, "verify", "no-optimizer")[0]


STATE = ("--training-state",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "tiny-init", "--training-state"), "tiny-init has no training state"),
        (("export", "full", "--training-state", "--dtype", "bfloat16"), "is not supported with"),
        (("export", "full", "--training-state", "--layout", "easylm"), "is not supported with"),
        (("save-init", "tiny", "--training-state"), "tiny has no training state"),
        (("save-init", "hf/checkpoint-4", *STATE, "--layers", "1"), "not supported with"),
    ],
)
def test_contradicting_requests_are_errors(
    folder: dict[int, float], capsys, arguments: tuple[str, ...], message: str
):
    assert message in error_lines(capsys, *arguments, "--out", "never")[0]
    assert not Path("never").exists()


# Training states of Trainer in other forms: FSDP, tied heads, other weight decay, and invalid ones


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
    numbered = step_leaves("numbered")
    named = step_leaves("named")
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
    leaves = step_leaves("tied")
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
    "three betas": (set_groups(betas=(0.9, 0.9, 0.9)), "b1 is not a number"),
    "tensor lr": (set_tensor_lr, "lr is not a number"),
    "amsgrad": (set_groups(amsgrad=True), "amsgrad is set"),
    "Adam": (set_groups(decoupled_weight_decay=False), "part of the gradient"),
    "other eps": (lambda s: s["param_groups"][1].update(eps=1e-6), "eps is 1e-08 and 1e-06"),
    "step nan": (set_steps(math.nan), "nan updates"),
    "step inf": (set_steps(math.inf), "inf updates"),
    "half a step": (set_steps(2.5), "2.5 updates"),
    "large step": (set_steps(1e12), "1e+12 updates"),
    "two steps": (set_steps([0.0, 0.0]), "must have one element"),
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


@pytest.mark.parametrize("step", [True, -1, 1 << 31, "5"])
def test_invalid_step_of_trainer_is_an_error(state: State, capsys, step: object):
    torch.save(state, "tiny/optimizer.pt")
    Path("tiny/trainer_state.json").write_text(json.dumps({"global_step": step}))
    lines = error_lines(capsys, "save-init", "tiny", "--training-state", "--out", "never")
    assert "trainer_state.json is broken" in lines[0]


def test_uneven_vocabulary_is_padded_with_its_moments(state: State, capsys):
    """`prep pad-vocab` would write the parameters without their moments."""
    torch.save(state, "tiny/optimizer.pt")
    arguments = ("save-init", "tiny", "--training-state", "--mesh", "1,1,4")
    lines = " ".join(error_lines(capsys, *arguments, "--out", "never"))
    assert "vocabulary 131 cannot be split" in lines
    assert "prep pad-vocab" not in lines
    run_ok(*arguments, "--pad-vocab", "auto", "--out", "padded")
    assert len(step_leaves("padded")["opt_state.adam.mu.embed.tokens"]) == 132


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


@pytest.mark.parametrize("recipe", ["[optimizer]\nlr = -1.0", "lr ="])
def test_broken_recipe_in_a_manifest_is_damaged(folder: dict[int, float], recipe: str):
    source = open_source(locate("full"))
    assert source.manifest is not None
    manifest = source.manifest | Manifest(recipe=recipe)
    with pytest.raises(DamagedError) as error:
        read_training_state(replace(source, manifest=manifest))
    assert error.value.what == "the recipe in the manifest of full is broken"
    assert error.value.why.startswith("its table `optimizer`: ")


@pytest.mark.slow
def test_averages_of_one_side_are_named(folder: dict[int, float], capsys):
    train("averaged", "optimizer.ema=0.9", stop_after=1)
    start = ("--set", "model.training_state=true", "--set", "data.tokenizer=tiny", "--dry-run")
    arguments = ("train", "recipe.toml", "--out", "next", *start)
    assert main([*arguments, "--set", "model.path=averaged/1"]) == 0
    warning = "12 leaves of averaged/1 are not used, e.g. opt_state.ema.embed.tokens"
    assert warning in " ".join(capsys.readouterr().err.split())
    ema = ("--set", "model.path=from-hf", "--set", "optimizer.ema=0.9")
    lines = error_lines(capsys, *arguments, *ema)
    assert lines[0] == "error: from-hf has no averages for `optimizer.ema`"
    assert lines[2] == " hint: `--set optimizer.ema=0`"
