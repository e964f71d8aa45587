"""The form in which runs keep their recipes: runs resume only if it stays readable and equal."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trainer.recipe import load_recipe, recipe_to_toml

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
