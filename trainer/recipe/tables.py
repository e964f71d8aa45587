"""The tables of a recipe as pydantic models: type, default and description of each key.

Error messages, docs/reference/recipes.md and the JSON schema are generated from these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
PATH_PATTERN = r"^[^\x00]+$"
PATH_SCHEMA = {"type": "string", "format": "path", "pattern": PATH_PATTERN}


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(pattern=PATH_PATTERN, json_schema_extra={"format": "path"})]
Paths = Annotated[
    tuple[PathText, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [PATH_SCHEMA, {"type": "array", "items": PATH_SCHEMA, "minItems": 1}]}),
]


def _if_absent(meaning: str) -> dict[str, Any]:
    """Return JSON schema extras that describe the value of an absent key."""
    return {"absent": meaning}


class Model(BaseModel):
    """The checkpoint to start from, and how the model is computed."""

    model_config = STRICT

    path: PathText = Field(
        description="an init checkpoint, a step of a run, or a Hugging Face folder", examples=["gpt-neo-1.3B-init"]
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of the computation; parameters and moments stay float32",
        examples=["bfloat16"],
    )
    scan_layers: bool = Field(
        default=True, description="compile one layer and loop over it; false: unroll all layers", examples=[True]
    )
    remat_policy: Literal[
        "none",
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "checkpoint_dots",
        "dots_with_no_batch_dims_saveable",
        "checkpoint_dots_with_no_batch_dims",
    ] = Field(
        default="none",
        description="activations that a layer saves for its backward pass, a name of `jax.checkpoint_policies`; "
        "none: all",
        examples=["nothing_saveable"],
    )
    head_chunk_size: PositiveInt | Literal[-1] = Field(
        default=512, description="tokens per row whose logits and loss are computed at a time; -1: all", examples=[512]
    )


class Data(BaseModel):
    """The training and evaluation data, and how it becomes sequences."""

    model_config = STRICT

    type: Literal["text", "json"] = Field(
        description="text: each file is a document; json: each line is an object with a document", examples=["text"]
    )
    path: Paths = Field(description="files, folders or globs", examples=["data/train.txt"])
    fields: str | None = Field(
        default=None,
        min_length=1,
        description="column of the text in each json object; for a model with an encoder, a list of columns with the "
        "source columns in brackets: `[title], [article], summary`",
        examples=["text"],
        json_schema_extra=_if_absent('"text" for json'),
    )
    source_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="maximum tokens of an encoder source; longer sources are truncated",
        examples=[512],
        json_schema_extra=_if_absent("no sources"),
    )
    source_prefix: str | None = Field(
        default=None,
        description="text put before each source",
        examples=["summarize: "],
        json_schema_extra=_if_absent("no prefix"),
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="a tokenizer.json, or a folder that contains one",
        examples=["gpt-neo-1.3B"],
        json_schema_extra=_if_absent("the model's tokenizer"),
    )
    seq_length: Annotated[int, Field(ge=2)] = Field(
        description="tokens per sequence; with an encoder, maximum tokens of a target: longer targets are truncated",
        examples=[1024],
    )
    packing: Literal["concatenate"] = Field(
        default="concatenate",
        description="concatenate all documents and cut them into sequences; the remainder is dropped. With an "
        "encoder, each pair of source and target is a sequence of its own",
    )
    holdout: UnitInterval = Field(
        default=0.0,
        description="fraction of the sequences, the last ones, used for evaluation instead of training",
        examples=[0.05],
    )
    eval_path: Paths | None = Field(
        default=None,
        description="files, folders or globs to evaluate on",
        examples=["data/validation.txt"],
        json_schema_extra=_if_absent("the sequences of `holdout`"),
    )
    cache: PathText | None = Field(
        default=None,
        description="folder of the tokenized data",
        examples=["~/tokens"],
        json_schema_extra=_if_absent("`data` in the run's folder"),
    )
    shuffle: bool = Field(default=True, description="shuffle the sequences in each epoch", examples=[True])


class Batch(BaseModel):
    """The number of sequences per step, and its division into micro-batches.

    Set `size` or a micro-batch size (`per_device` or `per_replica`). Or set two of `size`, a micro-batch size and
    `accumulate`.
    """

    model_config = STRICT

    size: PositiveInt | None = Field(
        default=None,
        description="sequences per step",
        examples=[32],
        json_schema_extra=_if_absent("micro-batch x `accumulate`"),
    )
    per_device: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch per device of the mesh",
        examples=[4],
        json_schema_extra=_if_absent("from `size`"),
    )
    per_replica: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch per replica of the model (dp x fsdp)",
        examples=[4],
        json_schema_extra=_if_absent("from `size`"),
    )
    accumulate: PositiveInt | None = Field(
        default=None,
        description="micro-batches per step",
        examples=[1],
        json_schema_extra=_if_absent("`size` / micro-batch, or 1"),
    )


class Optimizer(BaseModel):
    """The optimizer and its learning rate schedule."""

    model_config = STRICT

    type: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    lr: PositiveFloat = Field(description="peak learning rate, reached after warm-up", examples=[2e-5])
    end_lr: NonNegativeFloat = Field(
        default=0.0, description="learning rate at the end of the decay; not used by constant", examples=[2e-6]
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="shape of the learning rate decay", examples=["cosine"]
    )
    warmup_steps: NonNegativeInt | None = Field(
        default=None,
        description="steps in which the learning rate rises from 0",
        examples=[100],
        json_schema_extra=_if_absent("from `warmup_ratio`, or 0"),
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="warm-up as a fraction of the run's steps, rounded to whole steps",
        examples=[0.03],
        json_schema_extra=_if_absent("from `warmup_steps`, or 0"),
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="step at which `end_lr` is reached, counted from 0, warm-up included",
        examples=[10000],
        json_schema_extra=_if_absent("the run's steps"),
    )
    weight_decay: NonNegativeFloat = Field(
        default=0.0,
        description="weight decay, multiplied by the learning rate; not applied to biases and norms",
        examples=[0.01],
    )
    decay_embeddings: bool = Field(
        default=True, description="apply weight decay to embeddings as well", examples=[False]
    )
    b1: UnitInterval = Field(default=0.9, description="decay rate of the first moment", examples=[0.9])
    b2: UnitInterval = Field(default=0.999, description="decay rate of the second moment", examples=[0.95])
    eps: PositiveFloat = Field(
        default=1e-8, description="added to the square root of the second moment", examples=[1e-8]
    )
    clip_norm: NonNegativeFloat = Field(
        default=1.0, description="maximum global norm of the gradients; 0: no clipping", examples=[1.0]
    )


class Train(BaseModel):
    """The length of the run, and how often it logs and evaluates. Set either `steps` or `epochs`."""

    model_config = STRICT

    steps: PositiveInt | None = Field(
        default=None,
        description="optimizer steps of the run",
        examples=[1000],
        json_schema_extra=_if_absent("from `epochs`"),
    )
    epochs: PositiveFloat | None = Field(
        default=None,
        description="passes over the sequences",
        examples=[3],
        json_schema_extra=_if_absent("from `steps`"),
    )
    log_every: PositiveInt = Field(default=10, description="steps between two log lines", examples=[10])
    eval_every: NonNegativeInt = Field(
        default=0,
        description="steps between two evaluations; 0: only at the end, if there is evaluation data",
        examples=[500],
    )
    max_skipped: PositiveInt = Field(
        default=10,
        description="consecutive steps with a loss or gradients that are not finite, after which the run ends",
        examples=[10],
    )


class Eval(BaseModel):
    """The amount of data that an evaluation uses."""

    model_config = STRICT

    limit: NonNegativeInt = Field(
        default=0, description="sequences to evaluate on; 0: all evaluation data", examples=[256]
    )


class Checkpoint(BaseModel):
    """When checkpoints are saved, how many are kept, and what they contain."""

    model_config = STRICT

    every: NonNegativeInt = Field(
        default=0, description="steps between two checkpoints; 0: only after the last step", examples=[500]
    )
    keep: PositiveInt | Literal["all"] = Field(
        default=2, description="checkpoints to keep, the newest ones", examples=[2]
    )
    optimizer_state: bool = Field(
        default=True,
        description="save the optimizer state, which resuming needs; false: only parameters",
        examples=[True],
    )


class Recipe(BaseModel):
    """Name, random seed and device mesh of the run."""

    model_config = STRICT

    name: str = Field(
        pattern=r"^[^\s./\\-][^/\\\x00-\x1f\x7f]*$",
        description="name of the run, a plain folder name",
        examples=["first-run"],
        json_schema_extra=_if_absent("the recipe's file name"),
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="seed of the order of sequences and of all other random numbers", examples=[42]
    )
    mesh: str = Field(
        "-1,1,1",
        description="sizes `dp,fsdp,mp`, or names and sizes: `fsdp:64,mp:4`; one size may be -1: all remaining devices",
        examples=["1,8,1"],
    )
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    train: Train
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe; constraints between keys are not part of it."""
    recipe_schema = Recipe.model_json_schema()
    recipe_schema["required"].remove("name")  # defaults to the file's name
    return recipe_schema | {"title": "Recipe of prep train"}


def _leaf_schemas(recipe_schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield dotted key and JSON schema of every key; tables are not keys."""
    for name, key_schema in recipe_schema["properties"].items():
        if "$ref" not in key_schema:
            yield name, key_schema
            continue
        table_schema = recipe_schema["$defs"][key_schema["$ref"].rpartition("/")[2]]
        for key, leaf_schema in table_schema["properties"].items():
            yield f"{name}.{key}", leaf_schema


KEY_SCHEMAS: Mapping[str, Mapping[str, Any]] = dict(_leaf_schemas(schema()))  # dotted key -> JSON schema
TABLE_NAMES = tuple(dict.fromkeys(key.partition(".")[0] for key in KEY_SCHEMAS if "." in key))


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value
