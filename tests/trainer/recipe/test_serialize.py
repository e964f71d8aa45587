"""Recipes as TOML and as text."""

from __future__ import annotations

import hashlib
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.formatting import (
    key_line_numbers,
    override_argument,
    parse_override_value,
    to_toml,
)
from trainer.recipe.hints import accepts, override_hint
from trainer.recipe.key_types import KeySchema
from trainer.recipe.loading import RawRecipe, apply_overrides
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES

# The form in which runs keep their recipes: runs resume only if it stays readable and equal.

RECIPES = Path(__file__).parents[3] / "recipes"


# SHA-256 of the complete recipes.
DIGESTS = {
    "flan-t5-base.toml": "125f3c8ca78a6e240286a2962c90124bd555cac525cd64b7adc243f1cc370abc",
    "gpt-neo-1.3b.toml": "9f23b87a348e23f813824c3dfad897fad01b4b578805ff05a6767f305ddf69cd",
    "llama-7b.toml": "6a7d2c054fb164929d38972474487ef1eeb9de7f46d1a051af1aefff09836bd0",
}


# Keys added to prep after the digests were taken.
ADDED_KEYS = (
    *("ffn_chunk_size", "attention_kernel", "q_chunk_size", "k_chunk_size"),
    *(
        "rope_scaling",
        "rope_theta",
        "max_position_embeddings",
        "rules",
        "dropout",
        "fcm_ratio",
        "offload",
    ),
    *("reduction", "reduction_shards", "init", "preset", "config", "overrides"),
    "training_state",
    *("target_parameters", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *(
        "init_lr",
        "warmup_shape",
        "cooldown_steps",
        "cooldown_shape",
        "cooldown_waves",
        "cycles",
        "decay_exclude",
        "decay_include",
        "freeze",
        "moment_dtype",
        "ema",
        "loss_scale",
    ),
    *("format", "fields_from_example", "subfield_separator", "prepend_text", "add_bos", "add_eos"),
    *("always_start_with_bos", "max_examples", "at_start"),
    *("patience", "stride", "best_is"),
    *("config", "split", "revision", "sources", "ids_dtype", "bad_lines", "eval_split"),
    *("lock", "max_document_bytes"),
    *("chat_template", "template_args", "template_date", "data.loss", "loss_reasoning", "overlong"),
    *("objective", "noise_density", "mean_noise_span_length", "param_dtype"),
    *("eval_every_epochs", "profile", "every_epochs", "milestones", "best", "export_every", "push"),
    *("checkpoint.dtype", "checkpoint.storage"),
)


ADDED_TABLES = ("loss", "log", "lora")


# Text now -> the text in the digests, and the recipes with this text.
CHANGED_DEFAULTS = {
    "# head_chunk_size: chosen for the devices": ("head_chunk_size = 512", {*DIGESTS}),
    "# fields: the columns that `format` tells": (
        '# fields: "text" for json',
        {"gpt-neo-1.3b.toml"},
    ),
}


STORED = """\
name = "flan-t5-base"
seed = 32
mesh = "4,1,2"
# rules: the checkpoint's                       # default

[model]
path = "flan-t5-base-init"
# lock: no lock                                 # default
init = "checkpoint"                             # default
training_state = false                          # default
# preset: no preset                             # default
# config: the config of `path` or `preset`      # default
# overrides: no changes                         # default
dtype = "float32"                               # default
param_dtype = "float32"                         # default
scan_layers = true                              # default
remat_policy = "nothing_saveable"
offload = "none"                                # default
# head_chunk_size: chosen for the devices       # default
ffn_chunk_size = -1                             # default
attention_kernel = "auto"                       # default
# q_chunk_size: chosen for the devices          # default
# k_chunk_size: chosen for the devices          # default
# rope_scaling: the checkpoint's                # default
# rope_theta: the checkpoint's                  # default
# max_position_embeddings: the checkpoint's     # default
dropout = 0.0                                   # default
fcm_ratio = [0.0, 0.0]                          # default

[data]
type = "json"
path = "data/train.jsonl"
# config: its default                           # default
# split: "train", or the only one               # default
# revision: "main"                              # default
# sources: the dataset of `path`                # default
ids_dtype = "uint16"                            # default
bad_lines = 0                                   # default
max_document_bytes = 67108864                   # default
format = "text"                                 # default
# chat_template: the tokenizer's template       # default
# template_args: no variables                   # default
# template_date: no date                        # default
loss = "assistant"                              # default
loss_reasoning = true                           # default
fields = "[article], highlights"
# fields_from_example: `fields`                 # default
subfield_separator = " "                        # default
prepend_text = ""                               # default
# add_bos: the rule of the tokenizer            # default
# add_eos: true, or false for chat and ids      # default
always_start_with_bos = false                   # default
max_examples = 0                                # default
source_length = 1024
source_prefix = "summarize: "
# tokenizer: the model's tokenizer              # default
seq_length = 128
packing = "concatenate"                         # default
overlong = "split"                              # default
objective = "next_token"                        # default
noise_density = 0.15                            # default
mean_noise_span_length = 3.0                    # default
holdout = 0.0                                   # default
eval_path = "data/validation.jsonl"
# eval_split: the sequences of `holdout`        # default
# cache: `data` in the run's folder             # default
shuffle = true                                  # default

[batch]
# size: micro-batch x `accumulate`              # default
# per_device: from `size`                       # default
per_replica = 2
# accumulate: `size` / micro-batch, or 1        # default

[optimizer]
type = "adamw"                                  # default
lr = 3e-4
init_lr = 0.0                                   # default
end_lr = 0.0                                    # default
schedule = "linear"                             # default
warmup_steps = 100
# warmup_ratio: from `warmup_steps`, or 0       # default
warmup_shape = "linear"                         # default
# decay_steps: the run's steps                  # default
# cooldown_steps: a tenth of the steps, for wsd # default
# cooldown_shape: linear, for wsd               # default
# cooldown_waves: 0.5, for a cosine             # default
# cycles: needed by cosine_restarts             # default
weight_decay = 0.0                              # default
decay_embeddings = true                         # default
decay_exclude = []                              # default
decay_include = []                              # default
freeze = []                                     # default
moment_dtype = "float32"                        # default
ema = 0.0                                       # default
# loss_scale: dynamic for float16, else none    # default
b1 = 0.9                                        # default
b2 = 0.999                                      # default
eps = 1e-8                                      # default
clip_norm = 1.0                                 # default

[lora]
rank = 0                                        # default
# alpha: 2 x `rank`                             # default
targets = ["attn.q", "attn.v"]                  # default
target_parameters = []                          # default
dropout = 0.0                                   # default
rank_pattern = {}                               # default
alpha_pattern = {}                              # default
modules_to_save = []                            # default
use_rslora = false                              # default
# path: new adapters                            # default
base_dtype = "stored"                           # default

[loss]
z_loss = 0.0                                    # default
label_smoothing = 0.0                           # default

[train]
# steps: from `epochs`                          # default
epochs = 1.0
log_every = 10                                  # default
eval_every = 1000
# eval_every_epochs: from `eval_every`          # default
# profile: no profile                           # default
reduction = "fast"                              # default
# reduction_shards: a power of two up to 8      # default
max_skipped = 10                                # default

[eval]
limit = 1000
# at_start: true with evaluations in [train]    # default
# stride: sequences side by side                # default
patience = 0                                    # default

[checkpoint]
every = 1000
# every_epochs: from `every`                    # default
keep = 2                                        # default
milestones = 0                                  # default
# best: evaluations save no checkpoint          # default
# best_is: as fits `best`                       # default
optimizer_state = true                          # default
# dtype: `model.param_dtype`                    # default
storage = "ocdbt"                               # default
export_every = 0                                # default
# push: no upload                               # default

[log]
all_workers = false                             # default
tensorboard = false                             # default
# wandb: no W&B run                             # default
# samples: no texts are generated               # default
sample_every = 0                                # default
sample_tokens = 64                              # default
"""


def without_added_keys(table: str) -> str:
    """Return the text of a table without the lines of added keys."""
    name = table.partition("]")[0]
    keys = {
        line: line.removeprefix("# ").split(" ")[0].rstrip(":")
        for line in table.splitlines(keepends=True)
    }
    return "".join(
        line
        for line in table.splitlines(keepends=True)
        if {keys[line], f"{name}.{keys[line]}"}.isdisjoint(ADDED_KEYS)
    )


@pytest.mark.parametrize("name", DIGESTS)
def test_complete_recipe_keeps_its_digest(name: str):
    loaded = load_recipe(RECIPES / name)
    tables = recipe_to_toml(loaded.recipe, loaded.origins).split("\n[")
    text = "\n[".join(
        without_added_keys(table) for table in tables if table.partition("]")[0] not in ADDED_TABLES
    )
    for current, (earlier, recipes) in CHANGED_DEFAULTS.items():
        assert text.count(f"{current:<48}#") == (name in recipes)
        text = text.replace(f"{current:<48}#", f"{earlier:<48}#")
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[name]


def test_complete_recipe_keeps_its_text(tmp_path: Path):
    loaded = load_recipe(RECIPES / "flan-t5-base.toml")
    assert recipe_to_toml(loaded.recipe, loaded.origins) == STORED
    stored_path = tmp_path / "recipe.toml"
    stored_path.write_text(STORED)
    assert load_recipe(stored_path).recipe == loaded.recipe


def test_complete_recipe_keeps_a_rope_scaling(tmp_path: Path):
    factors = "[1, 1.5, 4.25e-3]"
    scaling = f"{{ rope_type = 'longrope', short_factor = {factors}, long_factor = {factors}, factor = 4 }}"
    overrides = (
        f"model.rope_scaling={scaling}",
        "model.rope_theta=5e5",
        "model.max_position_embeddings=4096",
    )
    loaded = load_recipe(RECIPES / "llama-7b.toml", overrides)
    text = recipe_to_toml(loaded.recipe, loaded.origins)
    (tmp_path / "recipe.toml").write_text(text)
    again = load_recipe(tmp_path / "recipe.toml").recipe
    assert again.model == loaded.recipe.model
    assert again.model.rope_scaling == {
        "rope_type": "longrope",
        "short_factor": [1, 1.5, 0.00425],
        "long_factor": [1, 1.5, 0.00425],
        "factor": 4,
    }
    assert (again.model.rope_theta, again.model.max_position_embeddings) == (5e5, 4096)


@pytest.mark.parametrize("names", [("attention_output",), ("q", "attention_output")])
def test_complete_recipe_keeps_names_of_activations(tmp_path: Path, names: tuple[str, ...]):
    overrides = (f"model.remat_policy={list(names)}", "model.offload=residuals")
    loaded = load_recipe(RECIPES / "llama-7b.toml", overrides)
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    model = load_recipe(tmp_path / "recipe.toml").recipe.model
    assert (model.remat_policy, model.offload) == (names, "residuals")


@pytest.mark.parametrize("rules", [(), ("embed=none",), ("embed=fsdp+sp", "kv_heads=mp|none")])
def test_complete_recipe_keeps_rules(tmp_path: Path, rules: tuple[str, ...]):
    loaded = load_recipe(RECIPES / "llama-7b.toml", [f"rules={list(rules)}"])
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(tmp_path / "recipe.toml").recipe.rules == rules


# Values as TOML: reading back, lines of keys, and values of `--set` after a shell has removed their quotes.


@pytest.mark.parametrize(
    "value",
    [
        "a\x7fb",
        "\x00\x1f\t\n\r",
        'quote " and \\ backslash',
        "\u2028 \U0001f600",
        {"a b": 1, "a.b": 2, "": 3, "plain-key_1": 4},
        [0.0025, 2e-05, 0.00025, -1e-300, 1e300],
        [True, False, 1],
    ],
    ids=ascii,
)
def test_to_toml_reads_back(value: object):
    assert tomllib.loads(f"value = {to_toml(value)}") == {"value": value}


DOCUMENT = '''\
# a comment with [model] in it
name = "x"

  [model]  # and here
path = """
[data]
type = 1
"""
data.deep.er = 3
[data]
path = [
  "a = 1",   # = ]
  "b",
]
inline = { a = 1, "b c" = { d = 2 } }
[[tables]]
x = 1
'''


def test_key_line_numbers_finds_keys_and_tables():
    assert key_line_numbers(DOCUMENT) == {
        "name": 2,
        "model": 4,
        "model.path": 5,
        "model.data": 9,
        "model.data.deep": 9,
        "model.data.deep.er": 9,
        "data": 10,
        "data.path": 11,
        "data.inline": 15,
        "tables": 16,
        "tables.x": 17,
    }


@given(st.lists(st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers())))
def test_keys_after_any_value_have_line_numbers(values: list[object]):
    lines = key_line_numbers("\n".join(f"k{i} = {to_toml(v)}" for i, v in enumerate(values)))
    assert lines == {f"k{number}": number + 1 for number in range(len(values))}


LISTS = """\
a = [
  [1],
  [ "b" ]
]
"c" = 1
[ d . "e" ]
f = { g = [
  1 ] }
"""


def test_lines_of_nested_lists_are_no_tables():
    assert key_line_numbers(LISTS) == {"a": 1, "c": 5, "d": 6, "d.e": 6, "d.e.f": 7}


QUOTES = '''\
a = """x""""
b = """
y"""""
c = ""
d = """"""
e = "\\\\"
f = 'it ends in \\'
g = 1
'''


def test_strings_that_end_in_quotes_have_line_numbers():
    assert key_line_numbers(QUOTES) == {"a": 1, "b": 2, "c": 4, "d": 5, "e": 6, "f": 7, "g": 8}


TEXTS = (
    *(
        "true",
        "8",
        "1e5",
        "nan",
        "2024-01-01",
        "1,8,1",
        "all",
        "a/b.txt",
        "a b",
        " a ",
        "a=b",
        "a;b",
        "#a",
        "{}",
    ),
    *(
        "[1]",
        "[a]",
        "[a], b",
        "'x'",
        '"x"',
        "''",
        'a"b',
        "a'b",
        "a\\b",
        "$HOME",
        "${A}/b",
        "!x",
        "~/x",
        "*.txt",
        "é",
    ),
)


VALUES: tuple[Any, ...] = (*TEXTS, 8, 0.5, 1e-8, True, False, ["a", "b"], ["1"], ["a b"])


TEXT_OR_BOOLEAN: KeySchema = {
    "description": "text or a boolean",
    "anyOf": [{"type": "boolean"}, {"type": "string"}],
}


def test_set_option_reads_back_equal():
    for key in KEY_SCHEMAS:
        for value in VALUES:
            if accepts(key, value):
                argument = shlex.split(override_hint(key, to_toml(value))[1:-1])
                assert (argument[0], len(argument)) == ("--set", 2), argument
                raw = RawRecipe(Path("x.toml"), {name: {} for name in TABLE_NAMES})
                overridden, diagnostics = apply_overrides(raw, argument[1:])
                assert not diagnostics
                assert overridden.get(key) == value


@pytest.mark.parametrize("text", ["true", "false"])
def test_text_that_looks_like_a_boolean_keeps_its_quotes(text: str):
    """A key that takes both needs the quotes of a text."""
    argument = override_argument("key", f'"{text}"', TEXT_OR_BOOLEAN)
    assert argument == f"key='\"{text}\"'"
    assert parse_override_value(shlex.split(argument)[0].partition("=")[2], TEXT_OR_BOOLEAN) == text
    assert override_argument("key", text, TEXT_OR_BOOLEAN) == f"key={text}"


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("name", "true", "name=true"),
        ("mesh", "1,8,1", "mesh=1,8,1"),
        ("checkpoint.keep", "all", "checkpoint.keep=all"),
        ("data.source_prefix", "summarize: it", 'data.source_prefix="summarize: it"'),
        ("data.source_prefix", "summarize: ", "data.source_prefix='\"summarize: \"'"),
        ("data.path", ["a", "b"], """data.path='["a", "b"]'"""),
        ("data.path", "$HOME/x", "data.path='\"$HOME/x\"'"),
        ("optimizer.lr", 2e-5, "optimizer.lr=2e-5"),
    ],
)
def test_override_argument_has_only_needed_quotes(key: str, value: Any, argument: str):
    assert override_argument(key, to_toml(value), KEY_SCHEMAS[key]) == argument


def test_numbers_for_a_list_of_numbers_are_not_text():
    assert parse_override_value("0.1", KEY_SCHEMAS["model.fcm_ratio"]) == 0.1
    assert parse_override_value("8", KEY_SCHEMAS["data.path"]) == "8", "a key of texts"


@pytest.mark.parametrize(
    "text", ["data.config=", 'data.config=""', "data.config=a", "data.config=''"]
)
def test_empty_value_removes_a_key_that_may_be_absent(text: str):
    raw = RawRecipe(Path("x.toml"), {"data": {"config": "en", "split": "train"}})
    overridden, diagnostics = apply_overrides(raw, ["data.config=de", text, "data.source_length="])
    assert not diagnostics
    assert overridden.tables["data"] == {"split": "train"} | (
        {"config": "a"} if text.endswith("a") else {}
    )
    assert overridden.overridden_keys == ({"data.config"} if text.endswith("a") else set())


def test_empty_value_of_a_required_key_is_kept():
    overridden, _ = apply_overrides(RawRecipe(Path("x.toml"), {"mesh": "1,1,1"}), ["mesh="])
    assert overridden.get("mesh") == ""
