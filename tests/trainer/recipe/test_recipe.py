"""Recipes: their tables, files and overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import FAILED, USAGE, PrepError, UsageError
from prepcli.models import mesh
from tests.golden.make_recipe_errors import GOOD
from trainer.recipe import batch_shape, complete_recipe, load_recipe, recipe_to_toml, schema
from trainer.recipe.conflicts import CHAT_KEYS, COLUMN_KEYS, NOISE_KEYS
from trainer.recipe.docs_page import PAGE, update_page
from trainer.recipe.key_types import KeySchema, alternatives, example_value, to_toml
from trainer.recipe.loading import RawRecipe, read_recipe
from trainer.recipe.lr_schedule import DECAYS
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable
from trainer.recipe.tables import KEY_SCHEMAS, Cluster, key_schemas_of, value_of
from trainer.recipe.text_fields import DEFAULT_FIELDS, SIGNS

# Valid recipes: loading them, and writing the complete recipe.

ROOT = Path(__file__).parents[3]

SMALL = """\
[model]
path = "tiny-init"
[data]
type = "text"
path = "train.txt"
seq_length = 8
[batch]
size = 4
[optimizer]
lr = 1e-3
[train]
steps = 20
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write SMALL to a file."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_load_recipe_fills_in_defaults(small: Path):
    loaded = load_recipe(small)
    recipe = loaded.recipe
    assert (recipe.name, recipe.seed, recipe.mesh) == ("small", 0, "-1,1,1")
    assert (recipe.model.path, recipe.data.path, recipe.data.fields) == (
        "tiny-init",
        ("train.txt",),
        None,
    )
    assert (recipe.checkpoint.keep, recipe.model.head_chunk_size) == (2, None)
    assert isinstance(recipe.optimizer, AdamWTable)
    assert recipe.optimizer.b2 == 0.999
    assert (
        loaded.origins["seed"]
        == loaded.origins["name"]
        == loaded.origins["eval.limit"]
        == "default"
    )
    assert set(KEY_SCHEMAS) - set(loaded.origins) == {
        "model.path",
        "data.type",
        "data.path",
        "data.seq_length",
        "batch.size",
        "optimizer.lr",
        "train.steps",
    }


def test_recipe_is_frozen(small: Path):
    recipe = load_recipe(small).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.optimizer.__setattr__("lr", 1.0)
    assert recipe == load_recipe(small).recipe


@pytest.mark.parametrize(
    ("data_format", "fields"),
    [("text", "text"), ("prompt_completion", "[prompt], completion"), ("chat", "messages")],
)
def test_default_fields_depend_on_the_format(small: Path, data_format: str, fields: str):
    overrides = ["data.type=json", f"data.format={data_format}"]
    assert load_recipe(small, overrides).recipe.data.fields == fields
    assert load_recipe(small, [*overrides, "data.fields=other"]).recipe.data.fields == "other"


def test_fields_of_json_are_found_unless_named(small: Path):
    data = load_recipe(small, ["data.type=json"]).recipe.data
    assert (data.format, data.fields) == ("auto", None)
    data = load_recipe(small, ["data.type=json", "data.format=text"]).recipe.data
    assert (data.format, data.fields) == ("text", "text")
    data = load_recipe(small, ["data.type=json", "data.fields=body"]).recipe.data
    assert (data.format, data.fields) == ("text", "body")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr = 1", "optimizer.lr", 1.0),
        ("mesh=1,64,4", "mesh", "1,64,4"),
        ("model.path=gpt2", "model.path", "gpt2"),
        ('name="a b"', "name", "a b"),
        ('data.path=["a", "b"]', "data.path", ("a", "b")),
        ("model.scan_layers=false", "model.scan_layers", False),
        ("checkpoint.keep=all", "checkpoint.keep", "all"),
        ("model.path=a=b", "model.path", "a=b"),
        ("name=2024", "name", "2024"),
        ("data.cache=1e3", "data.cache", "1e3"),
    ],
)
def test_override_is_toml_or_text(small: Path, text: str, key: str, value: object):
    loaded = load_recipe(small, [text])
    assert value_of(loaded.recipe, key) == value
    assert loaded.origins[key] == "override"


def test_last_override_of_a_key_wins(small: Path):
    assert load_recipe(small, ["seed=1", "seed=2"]).recipe.seed == 2


def test_only_paths_are_expanded(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    overrides = [
        "model.path=~/m",
        "data.path=['${DATA}/${DATA}.txt', '~', 'a~/$DATA']",
        "name=n${DATA}",
        "data.cache=~me/x",
    ]
    recipe = load_recipe(small, [overrides[0], overrides[1], overrides[3]]).recipe
    assert recipe.model.path == "/home/me/m"
    assert recipe.data.path == ("/data//data.txt", "/home/me", "a~/$DATA")
    assert recipe.data.cache == "~me/x"
    assert load_recipe(small, [overrides[2]]).recipe.name == "n${DATA}"


def test_examples_make_a_valid_recipe(tmp_path: Path):
    conflicting = {
        "batch.per_device",
        "batch.per_replica",
        "train.epochs",
        "optimizer.warmup_ratio",
        "data.eval_path",
    }
    conflicting |= {
        "lora.target_parameters",
        "data.source_length",
        "data.source_prefix",
        "data.fields_from_example",
        "data.objective",
        *CHAT_KEYS,
    }
    conflicting |= {
        "optimizer.loss_scale",
        "checkpoint.best_is",
        *SCHEDULE_KEYS,
        "lora.path",
        "model.training_state",
        "data.sources",
        "data.eval_split",
        *START_KEYS,
        *SAVE_KEYS,
    }
    values = {
        key: example_value(key_schema)
        for key, key_schema in key_schemas_of("adamw").items()
        if key not in conflicting
    }
    values |= {"data.type": "json", "optimizer.schedule": "cosine"}
    (tmp_path / "x.toml").write_text(toml(values))
    assert load_recipe(tmp_path / "x.toml").recipe.data.fields == "text"
    pair = [
        "data.fields=[article], summary",
        "data.source_length=512",
        "data.source_prefix=summarize: ",
    ]
    assert load_recipe(tmp_path / "x.toml", pair).recipe.data.source_prefix == "summarize:"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_recipes_are_valid(path: Path):
    recipe = load_recipe(path).recipe
    assert recipe.name == path.stem
    recipe_mesh = mesh.parse_mesh(recipe.mesh)
    n_replicas = recipe_mesh.n_devices // recipe_mesh.size("mp")
    assert batch_shape(
        recipe.batch, n_devices=recipe_mesh.n_devices, n_replicas=n_replicas
    ).accumulate in (1, 8)
    header = "".join(
        line for line in path.read_text().splitlines(keepends=True) if line.startswith("#")
    )
    commands = ("train", "launch slurm", "launch tpu")
    assert any(re.search(rf"prep {command} {path.stem}\s", header) for command in commands)


def test_docs_page_is_current():
    page = PAGE.read_text()
    assert page == update_page(page), "python -m trainer.recipe.docs_page"


def test_docs_page_has_tables_with_equal_rows():
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        # A `|` inside a cell ends the cell unless it is escaped.
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(counts) == 1, table


def test_schema_is_strict_json_schema():
    json_schema = json.loads(json.dumps(schema()))
    assert json_schema["required"] == ["model", "data", "batch", "optimizer", "train"]
    assert not json_schema["additionalProperties"]
    assert json_schema["$defs"]["AdamWTable"]["properties"]["lr"]["exclusiveMinimum"] == 0


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)

PATHS = TEXTS.filter(lambda text: "${" not in text and not text.startswith("~"))

NAMES = st.from_regex(r"[^\s./\\\x00-\x1f\x7f-][^/\\\x00-\x1f\x7f]*", fullmatch=True).filter(
    lambda t: t.isprintable()
)

# Keys that only one schedule has.
SCHEDULE_KEYS = [f"optimizer.{key}" for decay in DECAYS.values() for key in decay.keys]

# Keys of a random start. They replace `model.path`.
START_KEYS = ("model.init", "model.preset", "model.config")

TEXT_LISTS = (
    "data.loss",
    "data.path",
    "data.eval_path",
    "rules",
    "optimizer.freeze",
    "optimizer.decay_exclude",
    "optimizer.decay_include",
    "log.samples",
)

# Keys with examples that conflict with other defaults.
SAVE_KEYS = ("train.eval_every_epochs", "checkpoint.every_epochs", "checkpoint.dtype")

VALUES_BY_KEY = {
    "model.overrides": st.dictionaries(
        NAMES, st.integers(1, 2**20) | TEXTS, min_size=1, max_size=2
    ),
    "name": NAMES,
    "mesh": st.sampled_from(["1,8,1", "-1,1,1", "!fsdp:2,mp:4,sp:2"]),
    "rules": st.sampled_from(["embed=none", ["embed=fsdp+sp", "kv_heads=mp|none"]]),
    "cluster.dcn_mesh": st.just("1,1,1"),
    "model.rope_scaling": st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.floats(1, 64) | st.integers(1, 64)},
        optional={
            "truncate": st.booleans(),
            "original_max_position_embeddings": st.integers(1, 2**20),
        },
    ),
    "model.dropout": st.floats(0, 0.9)
    | st.just("config")
    | st.fixed_dictionaries({"residual": st.floats(0, 0.9)}),
    "model.fcm_ratio": st.lists(st.floats(0, 0.9), min_size=2, max_size=2).map(sorted),
    "data.path": PATHS | st.lists(PATHS, min_size=1, max_size=3),
    "data.eval_path": PATHS | st.lists(PATHS, min_size=1, max_size=3),
    "data.source_prefix": TEXTS,
    "optimizer.freeze": st.sampled_from(["embed.tokens", ["re:norm", "head"]]),
    "optimizer.decay_exclude": st.sampled_from(["embed.tokens", ["re:norm", "head"]]),
    "optimizer.decay_include": st.sampled_from(["embed.tokens", ["re:norm", "head"]]),
    "optimizer.schedule": st.sampled_from(["linear", "cosine", "constant", "rsqrt"]),
    "data.prepend_text": TEXTS,
    "checkpoint.push": st.sampled_from(["me/llama", "me/llama-13b@main"]),
    "optimizer.warmup_steps": st.integers(0, 9),
    "optimizer.decay_steps": st.integers(10, 2**30),
    "optimizer.warmup_ratio": st.just(0.0) | st.floats(1e-9, 0.4),
    "train.steps": st.integers(10, 2**30),
    "train.profile": st.fixed_dictionaries(
        {"start": st.integers(1, 99), "steps": st.integers(1, 9)}
    ),
    "data.template_args": st.dictionaries(TEXTS, st.booleans() | st.integers(0, 9) | TEXTS),
    "data.template_date": st.just("2026-01-31"),
    "eval.stride": st.integers(1, 2),
    "log.tensorboard": st.booleans() | PATHS,
    "log.samples": TEXTS | st.lists(TEXTS, min_size=1, max_size=3),
    "log.wandb": st.fixed_dictionaries(
        {"project": TEXTS},
        optional={"entity": TEXTS, "tags": st.lists(TEXTS), "offline": st.booleans()},
    ),
}

SCHEDULES_WITH_KEYS: list[dict[str, Any]] = [
    {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": 1},
    {
        "optimizer.schedule": "wsd",
        "optimizer.cooldown_shape": "cosine",
        "optimizer.cooldown_waves": 1.5,
    },
    {"optimizer.schedule": "cosine_restarts", "optimizer.cycles": 1},
]

LORA_VALUES: list[dict[str, Any]] = [
    {},
    {"lora.path": "adapter", "lora.base_dtype": "bfloat16"},
    {
        "lora.rank": 8,
        "lora.alpha": 4.5,
        "lora.targets": ["attn.*", "mlp.up"],
        "lora.use_rslora": True,
    },
]


def accepted_values(key_schema: KeySchema) -> st.SearchStrategy[Any]:
    """Generate accepted values of a key."""
    return st.one_of(*map(values_of_type, alternatives(key_schema)))


def values_of_type(alternative: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Generate values of one accepted type."""
    if "const" in alternative or "enum" in alternative:
        return st.sampled_from(alternative.get("enum") or [alternative["const"]])
    if "enum" in alternative.get("items", {}):
        return st.lists(st.sampled_from(alternative["items"]["enum"]), min_size=1)
    low = alternative.get("minimum", alternative.get("exclusiveMinimum", 0))
    high = alternative.get("maximum", alternative.get("exclusiveMaximum"))
    if alternative["type"] == "integer":
        return st.integers(low, high or 2**30)
    if alternative["type"] == "number":
        excludes_low, excludes_high = (
            "exclusiveMinimum" in alternative,
            "exclusiveMaximum" in alternative,
        )
        floats = st.floats(low, high or 1e30, exclude_min=excludes_low, exclude_max=excludes_high)
        # float32 has neither smaller numbers above 0 nor larger ones below 1.
        floats = floats.filter(
            lambda value: value == 0 or 1.2e-38 <= value <= 0.99999994 or value >= 1
        )
        return floats | (st.nothing() if high else st.integers(1, 9))
    return st.booleans() if alternative["type"] == "boolean" else PATHS


@st.composite
def valid_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Generate values by dotted key, without conflicting keys."""
    batch = draw(
        st.sampled_from(
            [("size",), ("per_device",), ("per_replica", "accumulate"), ("size", "per_replica")]
        )
    )
    length = draw(st.sampled_from(["steps", "epochs"]))
    warmup = draw(st.sampled_from(["warmup_steps", "warmup_ratio"]))
    chosen = {f"batch.{key}" for key in batch} | {f"train.{length}"}
    excluded = {
        "optimizer.warmup_steps",
        "optimizer.warmup_ratio",
        "optimizer.decay_steps",
        "data.fields",
    }
    excluded |= {
        "data.source_length",
        "data.source_prefix",
        "data.fields_from_example",
        *COLUMN_KEYS,
    }
    excluded |= {"log.sample_every", "log.sample_tokens"}
    excluded |= {"optimizer.loss_scale", *SCHEDULE_KEYS, "eval.at_start"}
    excluded |= {key for key in KEY_SCHEMAS if key.startswith("batch.")} | {
        "train.steps",
        "train.epochs",
    }
    policy_conflicts = {"model.attention_kernel", "model.ffn_chunk_size"}
    excluded |= {key for key in KEY_SCHEMAS if key.startswith("lora.")} | {
        "checkpoint.best",
        "checkpoint.best_is",
        "eval.patience",
        *SAVE_KEYS,
    }
    excluded |= {"model.offload", "model.training_state", *START_KEYS} | draw(
        st.sampled_from([{"model.remat_policy"}, policy_conflicts])
    )
    excluded |= {
        draw(st.sampled_from(["data.holdout", "data.eval_path"])),
        "train.eval_every",
        "eval.limit",
    }
    excluded |= {"data.sources", "data.eval_split", "data.objective", *NOISE_KEYS}
    optimizer = draw(st.sampled_from([*OPTIMIZER_TABLES]))
    schemas = key_schemas_of(optimizer)
    excluded |= {"optimizer.type"} | ({"optimizer.schedule"} if optimizer == "palm" else set[str]())
    required = {
        key for key, item in schemas.items() if "default" not in item and "absent" not in item
    } | chosen
    required |= {"model.path", "data.path"}
    optional = [*sorted(set(schemas) - required - excluded), f"optimizer.{warmup}"]
    keys = required | set(draw(st.lists(st.sampled_from(optional), unique=True)))
    values = {
        key: draw(VALUES_BY_KEY.get(key, accepted_values(schemas[key]))) for key in sorted(keys)
    }
    values |= {"optimizer.type": optimizer} if optimizer != "adamw" or draw(st.booleans()) else {}
    has_columns = values.get("data.type", "auto") in DEFAULT_FIELDS
    if has_columns and draw(st.booleans()):
        values["data.fields"] = draw(TEXTS.filter(lambda text: not SIGNS.search(text)))
        values |= draw(st.fixed_dictionaries({}, optional={"data.subfield_separator": TEXTS}))
    elif has_columns and draw(st.booleans()):
        values["data.fields_from_example"] = draw(TEXTS)
    elif has_columns and draw(st.booleans()):
        formats = (
            ["prompt_completion"]
            if "data.prepend_text" in values
            else ["chat", "prompt_completion"]
        )
        values["data.format"] = draw(st.sampled_from(formats))
    elif has_columns and draw(st.booleans()):
        values |= {
            "data.fields": "[title], [article], summary",
            "data.source_length": draw(st.integers(2, 2**30)),
        }
        values |= {"data.source_prefix": draw(TEXTS)} if draw(st.booleans()) else {}
    elif (
        "data.packing" not in values
        and "data.always_start_with_bos" not in values
        and draw(st.booleans())
    ):
        values |= {
            "data.objective": "span_corruption",
            "data.source_length": 512,
            "data.seq_length": 114,
        }
        values |= draw(
            st.fixed_dictionaries({}, optional={"data.noise_density": st.floats(0.1, 0.15)})
        )
    if values.get("data.format") != "chat":
        values = {key: value for key, value in values.items() if key not in CHAT_KEYS}
    if values.get("data.chat_template") == "training":
        values["data.loss"] = draw(st.sampled_from(["assistant", "last"]))
    if "log.samples" in values:
        counts = {"log.sample_every": st.integers(0, 9), "log.sample_tokens": st.integers(1, 9)}
        values |= draw(st.fixed_dictionaries({}, optional=counts))
    if "optimizer.schedule" in values and draw(st.booleans()):
        values |= draw(st.sampled_from(SCHEDULES_WITH_KEYS))
    values |= draw(st.sampled_from(LORA_VALUES))
    if values.get("data.holdout") or "data.eval_path" in values:
        values |= {
            "train.eval_every": draw(st.integers(0, 9)),
            "eval.limit": draw(st.integers(0, 9)),
        }
        values |= draw(st.fixed_dictionaries({}, optional={"eval.at_start": st.booleans()}))
    return values


def toml(flat: Mapping[str, Any]) -> str:
    """Return values by dotted key as TOML tables."""
    lines = [f"{key} = {to_toml(value)}" for key, value in flat.items() if "." not in key]
    for table in dict.fromkeys(key.partition(".")[0] for key in flat if "." in key):
        lines += [f"[{table}]"]
        lines += [
            f"{key.partition('.')[2]} = {to_toml(flat[key])}"
            for key in flat
            if key.startswith(f"{table}.")
        ]
    return "\n".join(lines)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(valid_recipes(), st.booleans())
def test_recipe_to_toml_round_trips(tmp_path: Path, flat: dict[str, Any], with_crlf: bool):
    path = tmp_path / "a.toml"
    path.write_bytes(toml(flat).replace("\n", "\r\n" if with_crlf else "\n").encode())
    loaded = load_recipe(path)
    for key, value in flat.items():
        expected = (value,) if key in TEXT_LISTS and isinstance(value, str) else value
        assert value_of(loaded.recipe, key) == (
            tuple(expected) if isinstance(expected, list) else expected
        )
        assert key not in loaded.origins
    written = tmp_path / "recipe.toml"
    written.write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(written).recipe == loaded.recipe.model_copy(update={"cluster": Cluster()})
    assert recipe_to_toml(load_recipe(written).recipe, loaded.origins) == written.read_text()


def test_recipe_to_toml_comments_on_origins(small: Path):
    loaded = load_recipe(small, ["optimizer.lr=0.5", 'data.path=["a", "b"]'])
    lines = recipe_to_toml(loaded.recipe, loaded.origins).splitlines()
    assert lines[4:7] == ["", "[model]", 'path = "tiny-init"']
    assert "steps = 20" in lines
    assert {
        'name = "small"                                  # default',
        "seed = 0                                        # default",
        "# decay_steps: the run's steps                  # default",
        "lr = 0.5                                        # override",
        'path = ["a", "b"]                               # override',
    } <= set(lines)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 10**30),
        ("batch.size", 2**31),
        ("data.seq_length", 2**63),
        ("optimizer.warmup_steps", 10**12),
    ],
)
def test_integers_beyond_int32_are_rejected(small: Path, key: str, value: int):
    with pytest.raises(PrepError, match=f"`{key}` is {value}") as caught:
        load_recipe(small, [f"{key}={value}"])
    assert "out of range: the maximum is 2,147,483,647" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("optimizer.eps=1e-39", "the smallest number above 0 is 1.2e-38"),
        ("optimizer.lr=1e-300", "the smallest number above 0 is 1.2e-38"),
        ("optimizer.b2=0.99999999", "the largest number below 1 is 0.99999994"),
    ],
)
def test_floats_that_float32_rounds_to_0_or_1_are_rejected(small: Path, setting: str, why: str):
    with pytest.raises(PrepError, match="out of range") as caught:
        load_recipe(small, [setting])
    assert why in str(caught.value)


def test_floats_at_the_ends_of_float32_are_accepted(small: Path):
    values = ["optimizer.eps=1.2e-38", "optimizer.b2=0.99999994", "optimizer.lr=0.99999999"]
    optimizer = load_recipe(small, values).recipe.optimizer
    assert isinstance(optimizer, AdamWTable)
    assert (optimizer.eps, optimizer.b2, optimizer.lr) == (1.2e-38, 0.99999994, 0.99999999)


def test_floats_beyond_float32_are_rejected(small: Path):
    with pytest.raises(PrepError, match=r"`optimizer\.lr` is 1e"):
        load_recipe(small, ["optimizer.lr=1e300"])


def test_intervals_beyond_int32_are_accepted(small: Path):
    assert load_recipe(small, [f"checkpoint.every={10**12}"]).recipe.checkpoint.every == 10**12


# Recipe files that do not exist, cannot be read, or are not recipes.


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_missing_recipe_suggests_similar_name():
    Path("llama-7b.toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("lama-7b.toml"))
    assert (
        str(caught.value)
        == "lama-7b.toml does not exist - a recipe is a TOML file - did you mean `llama-7b.toml`?"
    )
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("no/where.toml"))
    assert (
        str(caught.value)
        == "no/where.toml does not exist - a recipe is a TOML file - `prep recipes` lists recipes"
    )
    assert caught.value.code == USAGE


def test_folder_is_rejected_as_recipe():
    Path("init").mkdir()
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("init"))
    assert str(caught.value) == (
        "init is a folder - a recipe is a TOML file - "
        '`prep.train("RECIPE.toml", overrides="model.path=init")` for a checkpoint; `prep recipes` lists recipes'
    )


def test_io_error_is_not_a_usage_error():
    name = "x" * 300
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(name))
    assert (
        str(caught.value)
        == f"{name} cannot be read - File name too long - check the path and its permissions"
    )
    assert caught.value.code == FAILED


def test_byte_order_mark_and_crlf_are_accepted():
    Path("x.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(Path("x.toml")).recipe.mesh == "1,2,4"


def test_invalid_file_name_requires_a_name():
    Path(".toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(".toml"))
    assert caught.value.what == '.toml: `name` is ".toml"'
    assert load_recipe(Path(".toml"), ["name=x"]).recipe.name == "x"


def test_complete_recipe_needs_no_file():
    Path("x.toml").write_text(GOOD)
    tables = read_recipe(Path("x.toml")).tables
    loaded = complete_recipe(RawRecipe(Path("other.toml"), tables), ["seed=7"])
    assert (loaded.recipe.name, loaded.recipe.seed) == ("other", 7)
    with pytest.raises(PrepError) as caught:
        complete_recipe(RawRecipe(Path("other.toml"), {**tables, "seeds": 1}))
    assert caught.value.what == "other.toml: unknown key `seeds`"


# The table `log.wandb` of a recipe.

RECIPE = Path(__file__).parents[3] / "recipes" / "llama-7b.toml"


def test_wandb_table_is_kept_as_written():
    table = 'log.wandb={ project = "p", tags = ["a"], offline = true }'
    assert load_recipe(RECIPE, [table]).recipe.log.wandb == {
        "project": "p",
        "tags": ["a"],
        "offline": True,
    }


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({}, "`project` is missing"),
        ({"project": "p", "ofline": True}, "unknown key `ofline`"),
        ({"project": 3}, "`project` is 3"),
        ({"project": "p", "offline": 1}, "`offline` is 1"),
        ({"project": "p", "tags": "a"}, '`tags` is "a"'),
        ({"project": "p", "tags": ["a", ""]}, '`tags` is ["a", ""]'),
        ({"project": "p", "tags": ["a" * 65]}, "`tags` is"),
    ],
)
def test_invalid_wandb_tables_are_refused(table: dict[str, Any], what: str):
    with pytest.raises(UsageError) as caught:
        load_recipe(RECIPE, [f"log.wandb={to_toml(table)}"])
    assert f"`log.wandb`: {what}" in caught.value.what


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({}, "`start` is missing"),
        ({"start": 3}, "`steps` is missing"),
        ({"start": True, "steps": 1}, "`start` is true"),
        ({"start": 0, "steps": 1}, "`start` is 0"),
        ({"start": 1, "stesp": 1}, "unknown key `stesp`"),
    ],
)
def test_invalid_profiles_are_refused(table: dict[str, Any], what: str):
    with pytest.raises(UsageError) as caught:
        load_recipe(RECIPE, [f"train.profile={to_toml(table)}"])
    assert f"`train.profile`: {what}" in caught.value.what
