"""The keys of a recipe: type, default and meaning of each. Messages, the page and the schema are made from them."""

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
    """What holds where a key is not given, for the reader."""
    return {"absent": meaning}


class Model(BaseModel):
    """The checkpoint that training begins from, and how it is computed."""

    model_config = STRICT

    path: PathText = Field(
        description="an init checkpoint, a step of a run, or a Hugging Face folder", examples=["gpt-neo-1.3B-init"]
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the computation; parameters and moments stay float32", examples=["bfloat16"]
    )
    scan_layers: bool = Field(
        default=True, description="compile one layer and run it in a loop; false: all layers unrolled", examples=[True]
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
        description="what a layer keeps for its backward pass, a name of `jax.checkpoint_policies`; none: everything",
        examples=["nothing_saveable"],
    )
    head_chunk_size: PositiveInt | Literal[-1] = Field(
        default=512, description="tokens of a row that head and loss take at a time; -1: all", examples=[512]
    )


class Data(BaseModel):
    """What is read, and how it becomes sequences."""

    model_config = STRICT

    type: Literal["text", "json"] = Field(
        description="text: each file is a document; json: each line is an object that holds one", examples=["text"]
    )
    path: Paths = Field(description="files, folders or globs", examples=["data/train.txt"])
    fields: str | None = Field(
        default=None,
        min_length=1,
        description="the name of the text in each object of json; for a model with an encoder a list of names, those "
        "that it reads in brackets: `[title], [article], summary`",
        examples=["text"],
        json_schema_extra=_if_absent('"text" for json'),
    )
    source_length: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="tokens that an encoder reads; longer sources are cut",
        examples=[512],
        json_schema_extra=_if_absent("no sources"),
    )
    source_prefix: str | None = Field(
        default=None,
        description="text before each source",
        examples=["summarize: "],
        json_schema_extra=_if_absent("nothing"),
    )
    tokenizer: PathText | None = Field(
        default=None,
        description="a tokenizer.json, or a folder that has one",
        examples=["gpt-neo-1.3B"],
        json_schema_extra=_if_absent("the model's"),
    )
    seq_length: Annotated[int, Field(ge=2)] = Field(
        description="tokens of a sequence; after an encoder, of a target: longer ones are cut", examples=[1024]
    )
    packing: Literal["concatenate"] = Field(
        default="concatenate",
        description="all documents in a row, cut into sequences; what is left over is dropped. A source and its "
        "target are a sequence by themselves",
    )
    holdout: UnitInterval = Field(
        default=0.0, description="the last part of the sequences validates instead", examples=[0.05]
    )
    eval_path: Paths | None = Field(
        default=None,
        description="files, folders or globs that validate",
        examples=["data/validation.txt"],
        json_schema_extra=_if_absent("what `holdout` says"),
    )
    cache: PathText | None = Field(
        default=None,
        description="where the tokens are kept",
        examples=["~/tokens"],
        json_schema_extra=_if_absent("`data` in the run's folder"),
    )
    shuffle: bool = Field(default=True, description="a new order of the sequences in each epoch", examples=[True])


class Batch(BaseModel):
    """Sequences a step: `size`, or a micro-batch, or two of the kinds of keys, which say the third."""

    model_config = STRICT

    size: PositiveInt | None = Field(
        default=None,
        description="sequences a step",
        examples=[32],
        json_schema_extra=_if_absent("micro-batch x `accumulate`"),
    )
    per_device: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch, for each device of the mesh",
        examples=[4],
        json_schema_extra=_if_absent("what `size` says"),
    )
    per_replica: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch, for each replica of the model (dp x fsdp)",
        examples=[4],
        json_schema_extra=_if_absent("what `size` says"),
    )
    accumulate: PositiveInt | None = Field(
        default=None,
        description="micro-batches a step",
        examples=[1],
        json_schema_extra=_if_absent("`size` / micro-batch, or 1"),
    )


class Optimizer(BaseModel):
    """How gradients change the parameters."""

    model_config = STRICT

    type: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    lr: PositiveFloat = Field(description="the learning rate after warm-up", examples=[2e-5])
    end_lr: NonNegativeFloat = Field(
        default=0.0, description="the learning rate at the end of the decay; constant never gets there", examples=[2e-6]
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="how the learning rate decays", examples=["cosine"]
    )
    warmup_steps: NonNegativeInt | None = Field(
        default=None,
        description="steps in which the learning rate rises from 0",
        examples=[100],
        json_schema_extra=_if_absent("what `warmup_ratio` says, or 0"),
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="the same as a part of the run's steps, rounded",
        examples=[0.03],
        json_schema_extra=_if_absent("what `warmup_steps` says, or 0"),
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="the step at which `end_lr` is reached, counted from 0, warm-up included",
        examples=[10000],
        json_schema_extra=_if_absent("the run's steps"),
    )
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="times the learning rate; never on biases and norms", examples=[0.01]
    )
    decay_embeddings: bool = Field(default=True, description="weight decay on embeddings as well", examples=[False])
    b1: UnitInterval = Field(default=0.9, description="decay of the first moment", examples=[0.9])
    b2: UnitInterval = Field(default=0.999, description="decay of the second moment", examples=[0.95])
    eps: PositiveFloat = Field(default=1e-8, description="added to the root of the second moment", examples=[1e-8])
    clip_norm: NonNegativeFloat = Field(
        default=1.0, description="the norm that gradients are scaled down to; 0: none", examples=[1.0]
    )


class Train(BaseModel):
    """How long, and what is said meanwhile. One of `steps` and `epochs`."""

    model_config = STRICT

    steps: PositiveInt | None = Field(
        default=None,
        description="optimizer steps of the run",
        examples=[1000],
        json_schema_extra=_if_absent("what `epochs` says"),
    )
    epochs: PositiveFloat | None = Field(
        default=None,
        description="passes over the sequences",
        examples=[3],
        json_schema_extra=_if_absent("what `steps` says"),
    )
    log_every: PositiveInt = Field(default=10, description="steps between two lines of the log", examples=[10])
    eval_every: NonNegativeInt = Field(
        default=0,
        description="steps between two evaluations; 0: only at the end, if anything validates",
        examples=[500],
    )
    max_skipped: PositiveInt = Field(
        default=10,
        description="steps in a row with a loss or gradients that are not finite which end the run",
        examples=[10],
    )


class Eval(BaseModel):
    """How evaluation is done."""

    model_config = STRICT

    limit: NonNegativeInt = Field(
        default=0, description="sequences that are evaluated; 0: all that validate", examples=[256]
    )


class Checkpoint(BaseModel):
    """What the run leaves behind."""

    model_config = STRICT

    every: NonNegativeInt = Field(
        default=0, description="steps between two checkpoints; 0: only the last step's", examples=[500]
    )
    keep: PositiveInt | Literal["all"] = Field(default=2, description="how many stay, the newest", examples=[2])
    optimizer_state: bool = Field(
        default=True, description="keep what resuming needs; false: parameters only", examples=[True]
    )


class Recipe(BaseModel):
    """What a run is called, what its random numbers come from, and the devices it takes."""

    model_config = STRICT

    name: str = Field(
        pattern=r"^[^\s./\\-][^/\\\x00-\x1f\x7f]*$",
        description="the run's name, a plain folder name",
        examples=["first-run"],
        json_schema_extra=_if_absent("the recipe's file name"),
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="of the order of sequences and of all that is random", examples=[42]
    )
    mesh: str = Field(
        "-1,1,1",
        description="`dp,fsdp,mp`, or names: `fsdp:64,mp:4`; one may be -1: all that is left",
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
    """The JSON schema of a recipe; what keys say about one another is not in it."""
    whole = Recipe.model_json_schema()
    whole["required"].remove("name")  # the file's name is one
    return whole | {"title": "Recipe of prep train"}


def _leaf_schemas(recipe_schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, part in recipe_schema["properties"].items():
        if "$ref" not in part:
            yield name, part
            continue
        for key, inner in recipe_schema["$defs"][part["$ref"].rpartition("/")[2]]["properties"].items():
            yield f"{name}.{key}", inner


KEY_SCHEMAS: Mapping[str, Mapping[str, Any]] = dict(_leaf_schemas(schema()))  # dotted key -> its part of the schema
TABLE_NAMES = tuple(dict.fromkeys(key.partition(".")[0] for key in KEY_SCHEMAS if "." in key))


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value
