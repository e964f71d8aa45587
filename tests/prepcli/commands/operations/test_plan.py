"""`prep plan` on recipes, checkpoints and configs, without weights or data, and the compiler's plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.models.mesh import Mesh
from tests.helpers.run_cli import Capture, MonkeyPatch
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_plans import RECIPE, TINY
from trainer.distributed.compilation import CompileWatch
from trainer.planning.step_time import ACCELERATORS
from trainer.planning.training_plan import Collective, CompiledPlan
from trainer.recipe import Recipe
from trainer.training import compiled_plan as compiled

RECIPES = sorted(path.name for path in recipes_folder().glob("*.toml"))


@pytest.fixture(autouse=True)
def _in_empty_folder(monkeypatch: MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def plan_json(capsys: Capture, *words: str, code: int = OK) -> dict[str, Any]:
    """Run `prep plan --json` and return its object."""
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_are_planned_without_checkpoints(name: str, capsys: Capture):
    report = plan_json(capsys, name)
    assert report["memory"]["peak"] > report["memory"]["parameters"] > 0
    assert [kind["kind"] for kind in report["kinds"]][:2] == ["v4", "v5e"]
    assert any(kind["fits"] for kind in report["kinds"])


def test_name_of_a_shipped_recipe_is_planned(capsys: Capture):
    """The name of a recipe precedes the alias of a model, as in `prep train`."""
    by_name, by_file = (plan_json(capsys, f"llama-13b{suffix}") for suffix in ("", ".toml"))
    assert (by_name["mesh"], by_name["tokens"]) == (by_file["mesh"], by_file["tokens"])
    assert by_name["memory"] == by_file["memory"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-7b-32", "did you mean `llama-7b-32k`?"),
        ("gpt2-wikitex", "did you mean `gpt2-wikitext`?"),
        ("gpt2-x", "did you mean `gpt2-xl`?"),
    ],
    ids=["a recipe", "a folder", "an alias"],
)
def test_unknown_name_has_a_hint(name: str, hint: str, capsys: Capture):
    Path("gpt2-wikitext").mkdir()
    assert plan_json(capsys, name, code=USAGE)["error"]["hint"] == hint


def test_config_needs_no_known_name(capsys: Capture):
    make_checkpoint(Path("tiny"), LLAMA)
    words = ("llama-7b-32", "--config", "tiny/config.json", "--mesh", "1,2,4")
    assert plan_json(capsys, *words)["tokens"] == 2 * 64


def test_name_of_a_recipe_and_of_a_file_is_ambiguous(capsys: Capture):
    make_checkpoint(Path("tiny"), LLAMA)
    Path("llama-7b.toml").write_text(RECIPE)
    error = plan_json(capsys, "llama-7b", code=USAGE)["error"]
    assert error["what"] == "`llama-7b` is ambiguous"
    Path("tiny").rename("llama-7b")
    # It is the folder of a checkpoint.
    assert plan_json(capsys, "llama-7b", "--mesh", "1,2,4")["tokens"] == 2 * 64


def test_checkpoint_is_planned_with_its_recorded_mesh(capsys: Capture):
    make_checkpoint(Path("tiny"), LLAMA)
    assert main(["save-init", "tiny", "--pad-vocab", "auto", "--mesh", "1,2,4", "-q"]) == OK
    report = plan_json(capsys, "tiny-init")
    assert (report["mesh"], report["tokens"]) == ("1,2,4", 2 * 64)
    assert plan_json(capsys, "tiny", "--mesh", "1,2,4")["memory"] == report["memory"]
    longer = plan_json(capsys, "tiny-init", "--set", "data.seq_length=32", "--mesh", "1,8,1")
    assert (longer["mesh"], longer["tokens"]) == ("1,8,1", 8 * 32)
    assert plan_json(capsys, "tiny", "--devices", "v5e:4")["mesh"] == "1,4,1"


@pytest.mark.parametrize("mesh", ["1,-1,4", "fsdp:-1,mp:4"])
def test_number_of_devices_replaces_a_mesh_size_of_minus_1(mesh: str, capsys: Capture):
    report = plan_json(capsys, "llama-7b.toml", "--set", f"mesh={mesh}", "--devices", "16")
    assert (report["mesh"], len(report["kinds"])) == ("1,4,4", len(ACCELERATORS))
    assert plan_json(capsys, "gpt2", "--devices", "16")["mesh"] == "16,1,1", "the recipe's"


def test_outputs_of_other_commands_are_planned(capsys: Capture):
    make_checkpoint(Path("tiny"), LLAMA)
    for command in (
        ["pad-vocab", "tiny", "--multiple", "8", "--out", "padded"],
        ["save-init", "padded", "--out", "init"],
        ["export", "init", "--out", "back"],
    ):
        assert main([*command, "-q"]) == OK
    memories = [plan_json(capsys, name)["memory"] for name in ("padded", "init")]
    assert memories[0] == memories[1]
    # Without padding.
    assert plan_json(capsys, "back")["memory"]["parameters"] < memories[0]["parameters"]


def test_missing_init_is_planned_from_a_published_config(capsys: Capture):
    assert main(["plan", "llama-13b-init", "--mesh", "1,64,4"]) == OK
    out, err = capsys.readouterr()
    assert "13,015,864,320 parameters; mesh dp 1 x fsdp 64 x mp 4 = 256 devices" in out
    assert "shapes from the published config of llama-13b" in err


def test_encoder_models_have_sources_and_targets(capsys: Capture):
    report = plan_json(capsys, "flan-t5-base", "--mesh", "4,1,2")
    assert report["flops"]["attention_full"] > report["flops"]["attention_causal"] > 0


def test_config_replaces_a_missing_checkpoint(capsys: Capture):
    Path("config.json").write_text(json.dumps(TINY))
    Path("recipe.toml").write_text(RECIPE.replace("llama-7b-init", "my-init"))
    error = plan_json(capsys, "recipe.toml", "--mesh", "1,2,4", code=USAGE)["error"]
    assert error["what"] == "no checkpoint called `my-init`"
    report = plan_json(capsys, "recipe.toml", "--mesh", "1,2,4", "--config", "config.json")
    assert report["tokens"] == 8 * 16
    folder = plan_json(capsys, "recipe.toml", "--mesh", "1,2,4", "--config", ".")
    assert folder["memory"] == report["memory"]


def test_step_that_does_not_fit_names_keys_that_need_less_memory(capsys: Capture):
    sets = ("--set", "data.seq_length=16384", "--set", "model.attention_kernel=reference")
    words = ("llama-7b.toml", "--devices", "A100-40", *sets)
    assert not plan_json(capsys, *words)["kinds"][0]["fits"]
    assert main(["plan", *words]) == OK
    shown = " ".join(capsys.readouterr().out.split())
    assert "the step does not fit: `--search` lists meshes" in shown
    less = ("--set", "model.attention_kernel=blockwise")
    assert plan_json(capsys, *words, *less)["kinds"][0]["fits"]


def test_context_beyond_the_model_is_a_warning(capsys: Capture):
    report = plan_json(capsys, "llama-7b.toml", "--set", "data.seq_length=4096")
    assert report["warnings"] == [
        "`data.seq_length` is 4,096, and the model was made for 2,048 positions; `model.rope_scaling` extends them"
    ]


def test_plan_shows_the_bytes_sent_between_slices(capsys: Capture):
    recipe = str(recipes_folder() / "llama-7b.toml")
    words = (recipe, "--devices", "v5p:256", "--set", "mesh=4,64,1", "--set", "batch.size=256")
    axes: list[Any] = []
    for more in ((), ("--set", "cluster.dcn_mesh=dp:2")):
        traffic = plan_json(capsys, *words, *more)["traffic"]
        axes += [axis for axis in traffic if axis["axis"] == "dp"]
    whole, axis = axes
    assert axis["bytes"] + axis["bytes_between_slices"] == whole["bytes"]
    assert axis["slices"] == 2


def test_search_lists_fitting_meshes_first_the_fastest(capsys: Capture):
    report = plan_json(capsys, "llama-7b-32k.toml", "--search", "--devices", "v5p")
    rates = [mesh["tokens_per_s"] for mesh in report["meshes"]]
    assert rates == sorted(rates, reverse=True)
    assert all(mesh["fits"] and mesh["devices"] == 256 for mesh in report["meshes"])
    assert main(["plan", "llama-7b-32k.toml", "--search", "--devices", "v5p:64"]) == OK
    assert "meshes of 64 x v5p fit" in capsys.readouterr().out


SEARCH = ("--search", "--devices", "v4:8")


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (
            ["--search", "--devices", "8"],
            USAGE,
            "`--search` has no effect without `--devices KIND`",
        ),
        (["--devices", "9"], USAGE, "mesh 1,8,1 needs 8 devices, there are 9"),
        ([*SEARCH, "--html", "x"], USAGE, "`--html` has no effect with `--search`"),
        ([*SEARCH, "--mesh", "1,8,1"], USAGE, "`--mesh` has no effect with `--search`"),
        (["--mesh=-1,1,1"], USAGE, "mesh -1,1,1 needs the number of devices"),
        (["--devices", "v4:9"], USAGE, "mesh 1,8,1 needs 8 devices, there are 9"),
        (["--mesh", "1,1,3"], USAGE, "heads 32 cannot be split over mp 3"),
        (["--config", "none.json"], FAILED, ". has no none.json"),
        (["--set", "model.ffn_chunk_size=0"], USAGE, "`--set`: `model.ffn_chunk_size` is 0"),
    ],
)
def test_invalid_requests_are_errors(words: list[str], code: int, what: str, capsys: Capture):
    assert plan_json(capsys, "llama-7b.toml", *words, code=code)["error"]["what"] == what


def test_first_letters_of_a_device_kind_get_suggestions(capsys: Capture):
    error = plan_json(capsys, "llama-7b.toml", "--devices", "a100:8", code=USAGE)["error"]
    assert error["hint"] == "did you mean `A100-40` or `A100-80`?"


@pytest.mark.parametrize("devices", ["8xH100", "8 x h100", "h100x8"])
def test_number_and_kind_of_devices_get_a_suggestion(devices: str, capsys: Capture):
    error = plan_json(capsys, "llama-7b.toml", "--devices", devices, code=USAGE)["error"]
    assert error["hint"] == "`--devices H100:8`"


def test_page_is_self_contained(capsys: Capture):
    assert main(["plan", "llama-7b.toml", "--devices", "v5e", "--html", "plan.html"]) == OK
    page = Path("plan.html").read_text()
    assert page.count("<svg") == 1
    assert "src=" not in page
    assert "href=" not in page
    for text in ("saved activations", "memory of v5e", "does not fit", "PFLOP", "fsdp 8"):
        assert text in page
    report = plan_json(capsys, "llama-7b.toml", "--html", "no/folder.html", code=FAILED)
    assert report["error"]["what"] == "cannot read or write no/folder.html"


def test_how_to_page_shows_the_current_output(capsys: Capture):
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "plan.md").read_text()
    assert main(["plan", "llama-7b-32k.toml", "--devices", "v5p"]) == OK
    assert capsys.readouterr().out in page, "copy the output of the page's first command into it"


def test_kernel_of_another_platform_is_refused(capsys: Capture):
    words = ("llama-7b-32k.toml", "--set", "model.attention_kernel=pallas-splash", "--devices")
    assert plan_json(capsys, *words, "v5p")["memory"]["scores"] == 0
    assert main(["plan", *words, "H100"]) == USAGE
    assert "it runs on tpu, not on cuda" in capsys.readouterr().err


def test_auto_is_the_kernel_of_the_devices(capsys: Capture):
    words = ("llama-7b-32k.toml", "--set", "model.attention_kernel=auto", "--devices", "v5p")
    assert plan_json(capsys, *words)["memory"]["scores"] == 0
    # Splash attention has no dropout.
    assert plan_json(capsys, *words, "--set", "model.dropout=0.1")["memory"]["scores"] > 0


def test_plan_describes_the_settings_of_a_recipe(capsys: Capture):
    Path("config.json").write_text(json.dumps(TINY))
    Path("recipe.toml").write_text(RECIPE)
    keys = (
        *("data.type=json", "data.format=chat", "data.loss=last", "data.overlong=drop"),
        *("train.eval_every=5", "data.holdout=0.1", "eval.stride=8", "eval.patience=3"),
        *("optimizer.schedule=cosine_restarts", "optimizer.cycles=2"),
    )
    settings = [word for key in keys for word in ("--set", key)]
    words = ("recipe.toml", "--config", "config.json", "--mesh", "1,2,4", *settings)
    expected = [
        "learning rate 0.001, 2 cosines to 0 until step 20",
        "loss on the last turn of the assistant",
        "records of more than 16 tokens are left out",
        "evaluation every 5 steps on windows with stride 8; the run ends after 3 without a better eval_loss",
    ]
    assert main(["plan", *words, "--html", "plan.html"]) == OK
    assert capsys.readouterr().out.splitlines()[2:7] == [*expected, ""]
    page = Path("plan.html").read_text()
    assert all(f"<p>{line}</p>" in page for line in expected)
    assert plan_json(capsys, *words)["settings"] == expected


def test_plan_of_a_checkpoint_has_no_settings(capsys: Capture):
    assert plan_json(capsys, "gpt2")["settings"] != []
    assert plan_json(capsys, "llama-13b-init", "--mesh", "1,64,4")["settings"] == []


# `prep plan --compile`: the compiler's plan beside the estimate


MIB = 1 << 20
WORDS = ("plan", "nowhere", "--config", "config.json")


@pytest.fixture
def config_file():
    Path("config.json").write_text(json.dumps(LLAMA))


def compile_json(capsys: Capture, *words: str, code: int = OK) -> dict[str, Any]:
    """Run `prep plan --json` and return its object."""
    return plan_json(capsys, *WORDS[1:], *words, code=code)


@pytest.fixture
def requests(monkeypatch: MonkeyPatch) -> list[tuple[Recipe, Mapping[str, Any], str, str | None]]:
    """Replace the compilation by a fixed plan, and record its arguments."""
    recorded: list[tuple[Recipe, Mapping[str, Any], str, str | None]] = []

    def fake_plan(
        recipe: Recipe,
        manifest: Mapping[str, Any],
        mesh: Mesh,
        topology: str | None,
        *,
        watch: CompileWatch,
    ) -> CompiledPlan:
        watch.on_phase("XLA compiles it", 65.0)
        recorded.append((recipe, manifest, str(mesh), topology))
        return CompiledPlan(
            target=topology or "4 CPU devices",
            kernel="blockwise",
            is_upper_bound=topology is None,
            temp_nbytes=900 * MIB,
            argument_nbytes=100 * MIB,
            output_nbytes=101 * MIB,
            alias_nbytes=100 * MIB,
            compile_s=61.04,
            host_nbytes=1100 * MIB,
            collectives=(Collective("all-gather", 1234, 5 * MIB),),
            jax_version="0.12.0.1",
            libtpu_version="0.0.50.1" if topology else "",
        )

    monkeypatch.setattr(compiled, "compiled_plan", fake_plan)
    return recorded


@pytest.mark.usefixtures("config_file")
def test_step_is_compiled_for_cpu_devices(capsys: Capture):
    report = compile_json(capsys, "--mesh", "1,2,2", "--set", "data.seq_length=32", "--compile")
    compiled = report["compiled"]
    assert (compiled["target"], compiled["is_upper_bound"]) == ("4 CPU devices", True)
    assert compiled["kernel"] == "blockwise"
    assert compiled["peak"] == compiled["temporary"] + compiled["arguments"] + compiled["outputs"]
    assert compiled["ratio"] == compiled["estimated"] / compiled["peak"]
    assert compiled["arguments"] >= report["memory"]["parameters"] + report["memory"]["moments"]
    assert "all-reduce" in {collective["kind"] for collective in compiled["collectives"]}
    assert min(compiled["compile_s"], compiled["host_memory"]) > 0
    assert compiled["jax"] == version("jax")
    assert compiled["libtpu"] == ""


@pytest.mark.usefixtures("config_file")
def test_text_has_memory_collectives_and_cost(requests: list[Any], capsys: Capture):
    assert main([*WORDS, "--devices", "v5p:4", "--compile", "--set", "model.dtype=float32"]) == OK
    out, err = capsys.readouterr()
    report = compile_json(capsys, "--devices", "v5p:4", "--set", "model.dtype=float32")
    estimate = report["memory"]["peak"]
    lines = out.partition("memory of one device, compiled for v5p:2x2x1\n")[2].splitlines()
    assert [line.rsplit("  ", 1)[0].strip() for line in lines[:6]] == [
        "temporary arrays", "state and batch", "outputs not in place", "in all", "estimated", "estimated / in all",
    ]  # fmt: skip
    assert lines[3].endswith("1001 MiB")
    assert lines[5].endswith(f"{estimate / (1001 * MIB):.2f}")
    assert lines[8].split() == ["all-gather", "1,234", "5.0", "MiB"]
    cost = "in 61.0 s with 1.07 GiB of host memory"
    assert lines[10] == (
        f"Attention kernel blockwise; compiled by jax 0.12.0.1, libtpu 0.0.50.1 {cost}."
        " An operation in a loop counts once."
    )
    assert "compiling for v5p:2x2x1" in err
    assert "XLA compiles it, 65.0 s since the start" in err


@pytest.mark.usefixtures("config_file")
def test_upper_bound_is_compared_with_the_estimate_for_cpus(requests: list[Any], capsys: Capture):
    report = compile_json(capsys, "--devices", "H100:4", "--compile")
    assert requests[0][3] is None
    assert report["compiled"]["estimated"] > report["memory"]["peak"], "bfloat16 is widened"
    assert main([*WORDS, "--mesh", "1,2,2", "--compile"]) == OK
    out = capsys.readouterr().out
    assert "compiled for 4 CPU devices, an upper bound" in out
    assert out.endswith("accelerators need less memory.\n")


@pytest.mark.usefixtures("config_file")
def test_compile_uses_vocabulary_and_rules_of_the_plan(requests: list[Any], capsys: Capture):
    compile_json(capsys, "--mesh", "1,2,2", "--set", 'rules=["vocab=mp"]', "--compile")
    recipe, manifest, mesh, _ = requests[0]
    assert (recipe.mesh, mesh, manifest["rules"]) == ("1,2,2", "1,2,2", ["vocab=mp"])
    assert manifest["config"] == LLAMA | {"vocab_size": 132, "true_vocab_size": 131}
    assert (manifest["tied"], manifest["scan"], manifest["scan_axis"]) == (False, True, 0)


@pytest.mark.usefixtures("config_file")
def test_page_shows_the_compiled_step(requests: list[Any], capsys: Capture):
    assert main([*WORDS, "--devices", "v5e:4", "--compile", "--html", "plan.html"]) == OK
    page = Path("plan.html").read_text()
    for text in (
        "memory of one device, compiled for v5e:2x2",
        "temporary arrays",
        "all-gather",
        "Attention kernel blockwise; compiled by jax 0.12.0.1, libtpu 0.0.50.1 in",
    ):
        assert text in page


@pytest.mark.usefixtures("config_file")
def test_plan_without_compile_has_no_compiled_step(requests: list[Any], capsys: Capture):
    assert compile_json(capsys, "--mesh", "1,2,2")["compiled"] is None
    assert requests == []


@pytest.mark.usefixtures("config_file")
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--devices", "v5e:2"], "no slice of v5e has 2 chips"),
        (["--devices", "v5e:4", "--search"], "`--compile` has no effect with `--search`"),
    ],
)
def test_invalid_compilations_are_errors(
    words: list[str], what: str, requests: list[Any], capsys: Capture
):
    error = compile_json(capsys, *words, "--compile", code=USAGE)["error"]
    assert error["what"] == what
    assert requests == []


@pytest.mark.usefixtures("config_file")
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["blockwise", "auto"])
def test_step_is_compiled_for_a_tpu_slice(kernel: str, capsys: Capture, monkeypatch: MonkeyPatch):
    """XLA_FLAGS of the test suite are unknown to libtpu."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    words = ("--mesh", "1,2,2", "--devices", "v5e", "--set", f"model.attention_kernel={kernel}")
    compiled = compile_json(capsys, *words, "--compile")["compiled"]
    assert (compiled["target"], compiled["is_upper_bound"]) == ("v5e:2x2", False)
    assert compiled["temporary"] > 0


@pytest.mark.usefixtures("config_file")
def test_time_limit_ends_the_compilation(capsys: Capture):
    words = ("--mesh", "1,2,2", "--compile", "--compile-timeout", "0.01")
    error = compile_json(capsys, *words, code=FAILED)["error"]
    assert error["what"] == "the step was not compiled within 0.01 s"
    assert "--compile-timeout" in error["hint"]


# `prep.plan`: typed options in, a typed plan out


@pytest.mark.usefixtures("config_file")
def test_plan_returns_the_estimates():
    step = prep.plan("model", config="config.json", mesh="1,2,1", devices="H100:2")
    assert step.mesh == "1,2,1"
    assert step.peak_bytes > 0
    assert [estimate.kind.name for estimate in step.kinds] == ["H100"]
    assert not step.is_too_large
    assert step.compiled is None


@pytest.mark.usefixtures("config_file")
def test_plan_takes_overrides_as_one_text_or_several():
    config = Path("config.json")
    short = prep.plan("model", config=config, overrides="data.seq_length=16")
    several = ["data.seq_length=16", "batch.per_replica=2"]
    assert prep.plan("model", config=config, overrides=several).training_plan.tokens == (
        2 * short.training_plan.tokens
    )


@pytest.mark.usefixtures("config_file")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_timeout": 5.0}, "^`compile_timeout` has no effect without `compile=True`"),
        ({"compile": True, "compile_timeout": 0.001}, r"it must be at least 0\.01"),
        ({"mesh": "9"}, '^`mesh="9"` has 1 axis'),
    ],
)
def test_plan_errors_name_arguments(options: dict[str, Any], message: str):
    with pytest.raises(prep.UsageError, match=message):
        prep.plan("model", config="config.json", **options)
