"""`prep train` with another rotary embedding, rules, dropout or lock: the line of the summary, resuming and exports."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE, DamagedError, PrepError
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import flatten_tree
from prepcli.restore.item_reader import open_reader
from tests.helpers.optimizers import KEYS
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from tests.helpers.train_runs import set_keys, train_error, train_json
from tests.helpers.training_folder import write_tokenizer
from tests.helpers.training_states import read_leaves, same_state
from trainer.run.summary import dropout_text

# `prep train` with another rotary embedding: resuming, exporting, and models that do not support it.

pytestmark = pytest.mark.usefixtures("work_dir")

YARN = ("--set", "model.rope_scaling={rope_type='yarn', factor=4.0}")

LONG = (*YARN, *set_keys("model.max_position_embeddings=256", "data.seq_length=96"))

ROPE_LINE = "rotary embedding yarn (theta 10,000, factor 4, original positions 64); 256 positions"


def read_configs(*paths: str) -> list[dict[str, Any]]:
    return [json.loads(Path(path).read_text()) for path in paths]


def test_resumed_run_and_export_keep_the_rope(capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "2", *LONG) == STOPPED
    capsys.readouterr()
    code, what, why, _ = train_error(capsys, *LONG, "--set", "model.rope_theta=5e5")
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "model.rope_theta: not set -> 500000.0"
    code, what, why, _ = train_error(capsys, *LONG[2:])
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == 'model.rope_scaling: {rope_type = "yarn", factor = 4.0} -> not set'
    assert main(["train", "recipe.toml", *LONG]) == OK
    assert ROPE_LINE in capsys.readouterr().err
    run_ok("export", "runs/recipe", "--out", "learned")
    manifest, stored, exported = read_configs(
        "runs/recipe/12/prep-manifest.json",
        "runs/recipe/12/state/hf/config.json",
        "learned/config.json",
    )
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for config in (manifest["config"], stored, exported):
        assert (config["rope_scaling"], config["max_position_embeddings"]) == (scaling, 256)
    assert "rope_scaling" not in read_configs("tiny/config.json")[0]
    run_ok("verify", "runs/recipe")


def test_dry_run_accepts_contexts_within_the_scaled_positions(capsys: pytest.CaptureFixture[str]):
    words = ("--dry-run", "--set", "data.seq_length=200")
    warning = "`data.seq_length` is 200, and the model was made for 64 positions; `model.rope_scaling` extends them"
    for sets, warnings in (
        ((), [warning]),
        (YARN, []),
        (("--set", "model.max_position_embeddings=256"), []),
    ):
        capsys.readouterr()
        code, report = train_json(capsys, *words, *sets)
        lengths = [text for text in report["warnings"] if "seq_length" in text]
        assert (code, lengths) == (OK, warnings)
    assert main(["train", "recipe.toml", *words, *LONG[:4]]) == OK
    assert ROPE_LINE in capsys.readouterr().err


def test_model_with_learned_positions_is_rejected(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("neo"), GPT_NEO)
    write_tokenizer(Path("neo"))
    run_ok("save-init", "neo", "--pad-vocab", "8", "--mesh", "1,2,4")
    code, what, why, hint = train_error(capsys, *YARN, "--set", "model.path=neo-init")
    assert (code, what) == (USAGE, "`model.rope_scaling` cannot be applied to gpt_neo")
    assert (why, hint) == (
        "it has no rotary embedding",
        "remove `model.rope_scaling`",
    )
    assert not Path("runs").exists()


# `prep train` with partition rules of the recipe: losses, stored steps, resuming and padding.

RULES = ("--set", 'rules=["embed=mp", "heads=fsdp", "mlp=none"]')

OTHER_RULES = ("--set", "rules=embed=none")

# The rules of a run with RULES.
CHANGED = "vocab=mp, heads=fsdp, kv_heads=mp|none, mlp=none, embed=mp, layers=none, head_dim=none"

DEFAULTS = "vocab=mp, heads=mp, kv_heads=mp|none, mlp=mp, embed=fsdp, layers=none, head_dim=none"


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


def test_dry_run_prints_the_rules(capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    for words, text in (
        ((), DEFAULTS),
        (RULES, CHANGED),
    ):
        assert main(["train", "recipe.toml", "--dry-run", *words]) == OK
        assert f"rules {text}\n" in capsys.readouterr().err


def test_resumed_run_takes_the_rules_of_its_last_step(capsys: pytest.CaptureFixture[str]):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *RULES) == STOPPED
    capsys.readouterr()
    for words, text in (
        ((), CHANGED),
        (OTHER_RULES, DEFAULTS.replace("embed=fsdp", "embed=none")),
    ):
        assert main(["train", "recipe.toml", "--dry-run", *words]) == OK
        assert f"rules {text}\n" in capsys.readouterr().err


def test_empty_rules_replace_the_checkpoint_rules(capsys: pytest.CaptureFixture[str]):
    run_ok("reshard", "tiny-init", "--rule", "embed=none", "--mesh", "1,2,4", "--out", "whole")
    capsys.readouterr()
    for words, text in (
        ((), DEFAULTS.replace("embed=fsdp", "embed=none")),
        (("--set", "rules=[]"), DEFAULTS),
    ):
        assert (
            main(["train", "recipe.toml", "--dry-run", "--set", "model.path=whole", *words]) == OK
        )
        assert f"rules {text}\n" in capsys.readouterr().err


def test_padding_of_a_hf_folder_follows_the_rules():
    rules = set_keys('rules=["vocab=fsdp", "embed=none"]', "model.path=tiny")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *rules) == STOPPED
    manifest = read_manifest("runs/recipe/1")
    assert (manifest["rules"], manifest["config"]["vocab_size"]) == (
        ["vocab=fsdp", "embed=none"],
        132,
    )


def test_rules_that_do_not_divide_the_model_are_rejected(capsys: pytest.CaptureFixture[str]):
    code, what, *_ = train_error(capsys, *set_keys("mesh=1,1,8", "rules=kv_heads=mp"))
    assert (code, what) == (USAGE, "kv_heads 4 cannot be split over mp 8")
    code, what, *_ = train_error(capsys, "--set", "rules=kv_hads=mp")
    assert (code, what) == (USAGE, '`--set`: `rules = ["kv_hads=mp"]`: unknown dim `kv_hads`')


def test_dry_run_prints_rules_of_leaves_and_activations(capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    rules = json.dumps(["re:^head=none", "flaxlm:1,1", "act:seq=sp|none"])
    assert main(["train", "recipe.toml", "--dry-run", "--set", f"rules={rules}"]) == OK
    params = DEFAULTS.replace("embed=fsdp", "embed=none")
    activations = "act:residual_seq=sp|none, act:heads=none, act:kv_heads=none, act:seq=sp|none"
    assert f"rules re:^head=none, {params}, {activations}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("re:^attn=none", "`re:^attn=none` matches no leaf"),
        ("re:^head=mp", "`re:^head=mp` has 1 dim, and head.weight has 2"),
        ("flaxlm:3,1", '`--set`: `rules = ["flaxlm:3,1"]`: unknown preset'),
        ("act:sq=sp", '`--set`: `rules = ["act:sq=sp"]`: unknown dim of activations `sq`'),
    ],
)
def test_rules_that_do_not_fit_the_model_are_rejected(
    rule: str, what: str, capsys: pytest.CaptureFixture[str]
):
    code, message, *_ = train_error(capsys, "--set", f'rules=["{rule}"]')
    assert (code, message) == (USAGE, what)


def test_batch_is_checked_with_the_rules_of_the_run(capsys: pytest.CaptureFixture[str]):
    options = ("--set", "batch.size=7", "--dry-run")
    code, message, *_ = train_error(capsys, *options)
    assert (code, message) == (USAGE, "a micro-batch of 7 does not divide among 2 replicas")
    assert main(["train", "recipe.toml", *options, "--set", "rules=act:batch=dp"]) == OK
    run_ok("reshard", "tiny-init", "--rule", "act:batch=dp", "--out", "whole-batch")
    assert main(["train", "recipe.toml", *options, "--set", "model.path=whole-batch"]) == OK


# `prep train` with dropout: its line in the summary, resuming, and the rates of config.json.

DROPOUT = set_keys(
    "model.dropout={attention = 0.1, residual = 0.25}", "model.fcm_ratio=[0.0, 0.15]"
)


@pytest.mark.parametrize(
    ("dropout", "text"),
    [
        (NO_DROPOUT, ""),
        (DropoutConfig(embedding=0.1), "dropout embedding 0.1"),
        (DropoutConfig(fcm_ratio=(0.0, 0.15)), "forgetful causal masking of 0 to 0.15 of the keys"),
        (
            DropoutConfig(0.1, 0.25, fcm_ratio=(0.1, 0.1)),
            "dropout attention 0.1, residual 0.25; forgetful causal masking of 0.1 to 0.1 of the keys",
        ),
    ],
)
def test_dropout_text_lists_the_rates_that_are_set(dropout: DropoutConfig, text: str):
    assert dropout_text(dropout) == text


def test_run_with_dropout_prints_it_and_keeps_it(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "recipe.toml", "--stop-after", "1", *DROPOUT]) == STOPPED
    assert (
        "dropout attention 0.1, residual 0.25; forgetful causal masking" in capsys.readouterr().err
    )
    code, what, why, _ = train_error(capsys, *DROPOUT[:2])
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "model.fcm_ratio: [0.0, 0.15] -> [0.0, 0.0]"


def test_invalid_rate_in_config_json_is_an_error(capsys: pytest.CaptureFixture[str]):
    path = Path("tiny/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 2}))
    code, what, why, _ = train_error(capsys, *set_keys("model.path=tiny", "model.dropout=config"))
    assert (code, what) == (FAILED, "config.json is invalid")
    assert why == "attention_dropout is 2, it must be a number from 0 to below 1"


# The recipe key `model.lock`: a run starts only from the approved bytes.

ONE_STEP = ("train.steps=1", "data.holdout=0", "model.lock=start.json")


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_locked_model_trains_and_a_changed_one_does_not():
    prep.lock("tiny", "start.json")
    from_folder = (*ONE_STEP, "model.path=tiny")
    run_ok("train", "recipe.toml", *set_keys(*from_folder))
    change_byte(max(Path("tiny").glob("*.safetensors")))
    with pytest.raises(DamagedError, match="is damaged"):
        prep.train("recipe.toml", "other", overrides=from_folder)


def test_other_init_is_refused_by_its_manifest():
    prep.lock("tiny-init", "start.json")
    Path("tiny-init").rename("first")
    prep.save_init("tiny", "tiny-init", scan=False)
    with pytest.raises(PrepError, match=r"tiny-init differs from start\.json") as caught:
        prep.train("recipe.toml", overrides=ONE_STEP)
    assert "`prep-manifest.json` has" in caught.value.why


def test_lock_is_refused_with_no_verify():
    prep.lock("tiny-init", "start.json")
    with pytest.raises(PrepError, match="has no effect without the check"):
        prep.train("recipe.toml", overrides=ONE_STEP, verify=False)


def test_batches_and_tokenize_check_the_lock():
    prep.lock("tiny", "start.json")
    tokenizer = Path("tiny/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text() + " ")
    for read_data in (prep.batches, prep.tokenize_shard):
        with pytest.raises(PrepError, match=r"tiny differs from start\.json"):
            read_data("recipe.toml", overrides=(*ONE_STEP, "model.path=tiny"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["slurm"],
        ["tpu", "--accelerator", "v4-16", "--zone", "us-central2-b"],
        ["gke", "--image", "I", "--nodes", "1", "--devices-per-node", "8", "--claim", "runs"],
    ],
)
def test_launch_passes_the_lock_on(words: list[str], capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    words = ["launch", words[0], "recipe.toml", *words[1:], "--", "--set", "model.lock=start.json"]
    assert main(words) == OK
    assert "model.lock=start.json" in capsys.readouterr().out


# `prep train` with every optimizer: stop, resume, reshard and export.

RULE = {"adafactor": ["min_factored_size=8"], "palm": ["warmup_steps=10"]}

COMPACT = ["ema=0.9", "moment_dtype=bfloat16", "decay_exclude=re:attn"]

FREEZE = "freeze=['embed.tokens', 're:mlp|norm']"  # what is not frozen takes time to compile

STEPS = [*set_keys("train.steps=4", "checkpoint.every=0"), "-q"]


def options_of(name: str) -> list[str]:
    """Return the `--set` options of an optimizer with all that it can keep between steps."""
    keys = [f"type={name}", *RULE.get(name, []), *COMPACT, FREEZE]
    return set_keys(*(f"optimizer.{key}" for key in keys))


# By default test_bfloat16_run_is_saved_resumed_and_exported takes these steps with AdamW, and test_resume
# and test_optimizer_states restore the state of the others.
@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_stopped_run_resumes_and_reshards(work_dir: Path, name: str):
    options = [*options_of(name), *STEPS]
    assert main(["train", "recipe.toml", "--out", "whole", *options]) == OK
    assert (
        main(["train", "recipe.toml", "--out", "parts", "--stop-after", "2", *options]) == STOPPED
    )
    assert main(["train", "recipe.toml", "--out", "parts", *options]) == OK
    with open_reader(Path("whole/4")) as whole, open_reader(Path("parts/4")) as parts:
        state = read_leaves(parts)
        assert same_state(state, read_leaves(whole))
    assert any(leaf.startswith("opt_state.ema.layers") for leaf in state)
    assert not any(leaf.startswith("opt_state") and leaf.endswith("embed.tokens") for leaf in state)
    run_ok("reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "parts")
    run_ok("export", "apart", "--out", "learned")
    run_ok("verify", "learned", "parts")


def test_summary_states_batch_and_optimizer_size(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    sizes: dict[str, str] = {}
    for name in ("adamw", "lion"):
        assert main(["train", "recipe.toml", "--dry-run", "--set", f"optimizer.type={name}"]) == OK
        summary = capsys.readouterr().err
        assert "batch 8 x 16 = 128 tokens per step" in summary
        (sizes[name],) = re.findall(r"([\d.]+) KiB of parameters and moments per device", summary)
    assert float(sizes["lion"]) == pytest.approx(float(sizes["adamw"]) * 2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["type=lion", "eps=1e-6"],
            "unknown key `optimizer.eps` hint: `eps` is a key of adamw, muon",
        ),
        (["freeze=layers.attention"], "`layers.attention` of `optimizer.freeze` matches no leaf"),
        (["decay_exclude=re:xyz"], "`re:xyz` of `optimizer.decay_exclude` matches no leaf"),
    ],
)
def test_wrong_optimizer_keys_are_errors(
    work_dir: Path, capsys: pytest.CaptureFixture[str], keys: list[str], words: str
):
    options = set_keys(*(f"optimizer.{key}" for key in keys))
    assert main(["train", "recipe.toml", *options]) == USAGE
    assert words in " ".join(capsys.readouterr().err.split())


# `prep train` with parameters in bfloat16: notes, checkpoints, resuming, export and loading.

OPTIONS = set_keys("model.param_dtype=bfloat16", "train.steps=4", "checkpoint.every=0")


def read_step(path: str) -> dict[str, Any]:
    """Read all leaves of a step."""
    with open_reader(Path(path)) as reader:
        return read_leaves(reader)


def test_bfloat16_run_is_saved_resumed_and_exported(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "recipe.toml", "--out", "whole", *OPTIONS]) == OK
    num_values = sum(
        leaf.size for name, leaf in read_step("tiny-init").items() if name.startswith("params.")
    )
    words = " ".join(capsys.readouterr().err.split())
    assert "parameters float32 -> bfloat16: " in words
    assert f" of {num_values:,} values changed" in words
    assert (
        run_code("train", "recipe.toml", "--out", "parts", "--stop-after", "2", *OPTIONS) == STOPPED
    )
    capsys.readouterr()
    assert main(["train", "recipe.toml", "--out", "parts", *OPTIONS]) == OK
    assert "values changed" not in capsys.readouterr().err
    state = read_step("parts/4")
    assert same_state(state, read_step("whole/4"))
    assert {leaf.dtype.name for name, leaf in state.items() if name.startswith("params.")} == {
        "bfloat16"
    }
    assert {
        leaf.dtype.name for name, leaf in state.items() if name.startswith("opt_state.adam.mu")
    } == {"float32"}
    manifest = json.loads(Path("parts", "4", MANIFEST_FILE).read_bytes())
    assert 'param_dtype = "bfloat16"' in manifest["recipe"]
    run_ok("reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "parts")
    run_ok("export", "apart", "--out", "narrow")
    run_ok("verify", "narrow", "parts")
    run_ok("export", "parts", "--dtype", "float32", "--out", "wide")
    for checkpoint in ("parts", "narrow", "wide"):
        for path, leaf in flatten_tree(prep.load_params(checkpoint, "1,2,4")).items():
            # An export has no padding rows.
            expected = state[f"params.{path}"][tuple(map(slice, leaf.shape))]
            assert np.array_equal(np.asarray(leaf), expected.astype(np.float32)), (checkpoint, path)


def test_run_does_not_resume_with_another_param_dtype(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_code("train", "recipe.toml", "--stop-after", "1", *OPTIONS) == STOPPED
    assert (
        run_code("train", "recipe.toml", *OPTIONS, "--set", "model.param_dtype=float32") == FAILED
    )
    assert 'model.param_dtype: "bfloat16" -> "float32"' in capsys.readouterr().err


# `checkpoint.storage`: the steps of a run as arrays of zarr 3, which Orbax and all commands read.

SETTINGS = ("mesh=1,2,4", "checkpoint.every=1", "checkpoint.keep='all'", "data.holdout=0")


def train(run: str, *settings: str) -> None:
    words = set_keys(*SETTINGS, *settings)
    run_ok("train", "recipe.toml", "--out", run, *words)


def uses_zarr3(step: Path) -> bool:
    return json.loads((step / "state/_METADATA").read_text())["use_zarr3"]


def restored(step: Path) -> list[np.ndarray]:
    """Restore the state of a step with Orbax."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore((step / "state").absolute())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_run_changes_the_storage_of_its_steps_when_it_resumes(work_dir: Path):
    train("plain", "train.steps=3")
    train("run", "train.steps=1")
    train("run", "train.steps=3", "checkpoint.storage=zarr3")
    assert [uses_zarr3(Path("run") / step) for step in "123"] == [False, True, True]
    expected = restored(Path("plain/3"))
    actual = restored(Path("run/3"))
    assert len(expected) == len(actual)
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected))
    run_ok("verify", "run")
    run_ok("export", "run", "--out", "hf")
    run_ok("reshard", "run", "--params-only", "--out", "init")
    run_ok("verify", "init", "hf")


@pytest.mark.slow
def test_float32_run_starts_from_a_bfloat16_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok("train", "recipe.toml", "--out", "narrow", *OPTIONS)
    capsys.readouterr()
    options = ["--set", "model.path=narrow/4", "--stop-after", "3"]
    assert main(["train", "recipe.toml", "--out", "wide", *options]) == STOPPED
    assert "values changed" not in capsys.readouterr().err
    assert {leaf.dtype.name for name, leaf in read_step("wide/3").items() if "." in name} == {
        "float32",
        "int32",
    }


@pytest.mark.slow
def test_float16_run_trains(work_dir: Path):
    options = ["--set", "model.dtype=float16", *STEPS]
    assert main(["train", "recipe.toml", "--out", "half", *options]) == OK
    with open_reader(Path("half/4")) as reader:
        state = read_leaves(reader)
    assert (state["skipped"], state["loss_scale"], state["loss_scale_steps"]) == (0, 2.0**15, 4)
