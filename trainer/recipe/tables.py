"""The tables of a recipe as pydantic models: type, default and description of each key.

Error messages, docs/reference/recipes.md and the JSON schema are generated from these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from prepcli.core.errors import Key, Text, text, usage_error
from prepcli.core.process_address import DEFAULT_PORT, ProcessSettings
from trainer.recipe.data_table import Data
from trainer.recipe.key_types import (
    STRICT,
    InSchedule,
    KeySchema,
    MayChange,
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Prompts,
    RuleTexts,
    Table,
    UnitInterval,
    alternatives,
    example_value,
    if_absent,
    to_toml,
)
from trainer.recipe.model_table import Lora, Model
from trainer.recipe.optimizer_tables import DEFAULT_OPTIMIZER, OPTIMIZER_TABLES, AnyOptimizerTable

OptionalText = Annotated[NonEmptyText, Field(examples=["llama"])] | None
Direction = Literal["lowest", "highest"]
EVAL_LOSS = "eval_loss"
# The values of each evaluation that can select a step, and which of them is the best.
EVAL_METRICS: Mapping[str, Direction] = {
    EVAL_LOSS: "lowest",
    "eval_perplexity": "lowest",
    "eval_accuracy": "highest",
}


class Batch(BaseModel):
    """The number of sequences per step, and its division into micro-batches.

    Set `size` or a micro-batch size (`per_device` or `per_replica`). Or set two of `size`, a
    micro-batch size and `accumulate`.
    """

    model_config = STRICT

    size: PositiveInt | None = Field(
        default=None,
        description="sequences per step",
        examples=[32],
        json_schema_extra=if_absent("micro-batch x `accumulate`"),
    )
    per_device: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch per device of the mesh",
        examples=[4],
        json_schema_extra=if_absent("from `size`"),
    )
    per_replica: PositiveInt | None = Field(
        default=None,
        description="sequences of a micro-batch per replica of the model (dp x fsdp)",
        examples=[4],
        json_schema_extra=if_absent("from `size`"),
    )
    accumulate: PositiveInt | None = Field(
        default=None,
        description="micro-batches per step",
        examples=[1],
        json_schema_extra=if_absent("`size` / micro-batch, or 1"),
    )


class Loss(BaseModel):
    """Terms of the training loss other than the cross entropy. Evaluation does not have them."""

    model_config = STRICT

    z_loss: NonNegativeFloat = Field(
        default=0.0,
        description="coefficient of log(Z)^2, with the sum Z of the exponentials of a token's logits",
        examples=[1e-4],
    )
    label_smoothing: UnitInterval = Field(
        default=0.0,
        description="share of the target distribution that is uniform over the vocabulary",
        examples=[0.1],
    )


class Profile(BaseModel):
    """The keys of `train.profile`."""

    model_config = STRICT

    start: PositiveInt = Field(description="first step to record", examples=[10])
    steps: PositiveInt = Field(description="steps to record", examples=[3])


class Train(BaseModel):
    """The length of the run, and how often it logs and evaluates. Set either `steps` or `epochs`."""

    model_config = STRICT

    steps: InSchedule[PositiveInt | None] = Field(
        default=None,
        description="optimizer steps of the run",
        examples=[1000],
        json_schema_extra=if_absent("from `epochs`"),
    )
    epochs: InSchedule[PositiveFloat | None] = Field(
        default=None,
        description="passes over the sequences",
        examples=[3],
        json_schema_extra=if_absent("from `steps`"),
    )
    log_every: MayChange[PositiveInt] = Field(
        default=10, description="steps between two log lines", examples=[10]
    )
    eval_every: MayChange[NonNegativeInt] = Field(
        default=0,
        description="steps between two evaluations. `0`: only at the end, if there is evaluation data",
        examples=[500],
    )
    eval_every_epochs: MayChange[PositiveFloat | None] = Field(
        default=None,
        description="passes over the sequences between two evaluations",
        examples=[0.5],
        json_schema_extra=if_absent("from `eval_every`"),
    )
    profile: MayChange[Table | None] = Field(
        default=None,
        description="steps to record with the profiler of JAX, in the folder `profile` of the run",
        examples=[{"start": 10, "steps": 3}],
        json_schema_extra=if_absent("no profile"),
    )
    reduction: Literal["fast", "exact"] = Field(
        default="fast",
        description="`fast`: sum gradients in the order that is fastest on the mesh. `exact`: in a fixed order, so "
        "that results do not depend on the number of devices that split the batch",
        examples=["exact"],
    )
    reduction_shards: PositiveInt | None = Field(
        default=None,
        description="logical shards of a batch that an exact reduction sums: a power of two, and a multiple of dp x "
        "fsdp x `accumulate` on every mesh whose results should be equal. By default the largest up to 8",
        examples=[16],
        json_schema_extra=if_absent("a power of two up to 8"),
    )
    max_skipped: MayChange[PositiveInt] = Field(
        default=10,
        description="consecutive skipped steps after which the run ends. A step is skipped if its loss or"
        " gradients are not finite, or if no token has a weight",
        examples=[10],
    )


class Eval(BaseModel):
    """The data of an evaluation, whether there is one before the first step, and whether they end a run."""

    model_config = STRICT

    limit: NonNegativeInt = Field(
        default=0, description="sequences to evaluate on. `0`: all evaluation data", examples=[256]
    )
    at_start: bool | None = Field(
        default=None,
        description="evaluate before the first step of the run",
        examples=[True],
        json_schema_extra=if_absent("true with evaluations in [train]"),
    )
    stride: PositiveInt | None = Field(
        default=None,
        description="tokens between the starts of two windows of `data.seq_length` tokens. Each evaluated token counts "
        "once, with at least `seq_length` - `stride` tokens before it",
        examples=[512],
        json_schema_extra=if_absent("sequences side by side"),
    )
    patience: NonNegativeInt = Field(
        default=0,
        description="evaluations in a row without a better `checkpoint.best`, or `eval_loss`, after which the run ends "
        "early. `0`: it takes all steps",
        examples=[3],
    )


class Checkpoint(BaseModel):
    """When checkpoints are saved, how many are kept, and what they contain."""

    model_config = STRICT

    every: NonNegativeInt = Field(
        default=0,
        description="steps between two checkpoints. `0`: only after the last step",
        examples=[500],
    )
    every_epochs: PositiveFloat | None = Field(
        default=None,
        description="passes over the sequences between two checkpoints",
        examples=[1],
        json_schema_extra=if_absent("from `every`"),
    )
    keep: PositiveInt | Literal["all"] = Field(
        default=2, description="checkpoints to keep, the newest ones", examples=[2]
    )
    milestones: NonNegativeInt = Field(
        default=0,
        description="steps between two checkpoints that are never removed. `0`: none",
        examples=[10000],
    )
    best: Annotated[str, Field(pattern=r"^eval_\w+$")] | None = Field(
        default=None,
        description="save each step whose evaluation has the best value so far, and keep the best one: `eval_loss`, "
        "`eval_perplexity`, `eval_accuracy`, or `eval_NAME` of a `metric_fn`",
        examples=["eval_loss"],
        json_schema_extra=if_absent("evaluations save no checkpoint"),
    )
    best_is: Direction | None = Field(
        default=None,
        description="the best value of a `metric_fn` in `best`",
        examples=["highest"],
        json_schema_extra=if_absent("as fits `best`"),
    )
    optimizer_state: bool = Field(
        default=True,
        description="save the optimizer state, which resuming needs. `false`: only parameters",
        examples=[True],
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype of the parameters in checkpoints without optimizer state",
        examples=["bfloat16"],
        json_schema_extra=if_absent("`model.param_dtype`"),
    )
    storage: Literal["ocdbt", "zarr3"] = Field(
        default="ocdbt",
        description="arrays of checkpoints: of zarr 2 (`ocdbt`) or zarr 3 (`zarr3`), both in OCDBT databases",
        examples=["zarr3"],
    )
    export_every: NonNegativeInt = Field(
        default=0,
        description="steps between two exports to Hugging Face folders `exports/STEP` in the run's folder. `0`: none",
        examples=[1000],
    )
    push: str | None = Field(
        default=None,
        min_length=1,
        description="repository on the hub that receives the export of the last step",
        examples=["me/llama-13b"],
        json_schema_extra=if_absent("no upload"),
    )


class WandbRun(BaseModel):
    """The keys of `log.wandb`: arguments of `wandb.init`, and `offline`."""

    model_config = STRICT

    project: NonEmptyText = Field(description="W&B groups runs by project", examples=["llama"])
    entity: OptionalText = None
    group: OptionalText = None
    name: OptionalText = None
    notes: OptionalText = None
    job_type: OptionalText = None
    # W&B raises a ValueError for longer tags.
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default=[], description="each has 1 to 64 characters", examples=[["baseline"]]
    )
    offline: bool = Field(default=False, examples=[True])


class Log(BaseModel):
    """The processes that print and write metrics, further logs, and texts to generate during a run."""

    model_config = STRICT

    all_workers: bool = Field(
        default=False,
        description="print the lines of every process, and write a metrics file for each. `false`: only for process 0",
        examples=[True],
    )
    csv: bool = Field(
        default=False,
        description="write `metrics.csv` in the run's folder: `metrics.jsonl` as a table for spreadsheets",
        examples=[True],
    )
    tensorboard: bool | PathText = Field(
        default=False,
        description="write event files for TensorBoard. `true`: to `tensorboard` in the run's folder. A path: to a "
        "folder with the run's name in it. Needs the extra `tensorboard`",
        examples=[True],
    )
    wandb: dict[str, Any] | None = Field(
        default=None,
        description="log to Weights & Biases: a table with `project`, and optionally `entity`, `group`, `name`, "
        "`notes`, `job_type`, `tags`, and `offline = true`. Needs the extra `wandb`",
        examples=[{"project": "llama", "offline": True}],
        json_schema_extra=if_absent("no W&B run"),
    )
    samples: Prompts | None = Field(
        default=None,
        description="prompts to generate texts from during the run, with the most likely token at each position. A "
        'prompt is a text, or a conversation for the chat template: `{messages = [{role = "user", content = "Hi"}]}`, '
        "optionally with `tools`. An encoder-decoder model reads them with its encoder. They are written to "
        "`samples.jsonl` in the run's folder, and shown in its report",
        examples=[["Once upon a time"]],
        json_schema_extra=if_absent("no texts are generated"),
    )
    sample_every: NonNegativeInt = Field(
        default=0,
        description="steps between two generations of `samples`, from step 0 on. `0`: only after the last step",
        examples=[500],
    )
    sample_tokens: PositiveInt = Field(
        default=64,
        description="maximum number of new tokens of each text. There are fewer if the longest prompt leaves "
        "fewer positions",
        examples=[64],
    )


class Cluster(BaseModel):
    """The processes of a run on one or several hosts. Absent keys are read from a launcher such as SLURM."""

    model_config = STRICT

    host0_address: str | None = Field(
        default=None,
        min_length=1,
        description="address of the host of process 0, which all other hosts can reach",
        examples=["10.0.0.1"],
        json_schema_extra=if_absent("from the launcher"),
    )
    host0_port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=DEFAULT_PORT, description="port of process 0", examples=[DEFAULT_PORT]
    )
    n_processes: PositiveInt | None = Field(
        default=None,
        description="number of processes",
        examples=[2],
        json_schema_extra=if_absent("from the launcher"),
    )
    process_id: NonNegativeInt | None = Field(
        default=None,
        description="index of this process, from 0",
        examples=[0],
        json_schema_extra=if_absent("from the launcher"),
    )
    n_local_devices: PositiveInt | None = Field(
        default=None,
        description="number of devices of this process: the first ones of its host. Under SLURM and Open MPI the next "
        "ones, by local index",
        examples=[8],
        json_schema_extra=if_absent("all devices, or an even part under SLURM or Open MPI"),
    )
    dcn_mesh: str | None = Field(
        default=None,
        min_length=1,
        description="number of slices per mesh axis, for slices that a slower network connects: `fsdp:2`. Each "
        "divides its axis of `mesh`",
        examples=["fsdp:2"],
        json_schema_extra=if_absent("one slice"),
    )
    start_timeout: PositiveFloat = Field(
        default=300.0, description="seconds to wait for all processes to start", examples=[300]
    )
    heartbeat_timeout: PositiveFloat = Field(
        default=60.0,
        description="seconds without a heartbeat after which a process counts as lost and the others end",
        examples=[60],
    )
    step_timeout: NonNegativeFloat = Field(
        default=0.0,
        description="seconds after which an unfinished step ends the run. `0`: no limit",
        examples=[1800],
    )

    @property
    def process_settings(self) -> ProcessSettings:
        """The keys that say which process this is."""
        return ProcessSettings(
            self.host0_address,
            host0_port=self.host0_port,
            num_processes=self.n_processes,
            process_id=self.process_id,
            num_local_devices=self.n_local_devices,
        )


class Recipe(BaseModel):
    """Name, random seed, device mesh and partition rules of the run."""

    model_config = STRICT

    name: MayChange[str] = Field(
        pattern=r"^[^\s./\\\x00-\x1f\x7f-][^/\\\x00-\x1f\x7f]*$",
        description="name of the run, a plain folder name",
        examples=["first-run"],
        json_schema_extra=if_absent("the recipe's file name"),
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0,
        description="seed of the order of sequences and of all other random numbers",
        examples=[42],
    )
    mesh: MayChange[str] = Field(
        "-1,1,1",
        description="sizes `dp,fsdp,mp`, or names and sizes: `fsdp:64,mp:4,sp:2`. One size may be -1: all remaining "
        "devices. `sp` splits the tokens of a sequence",
        examples=["1,8,1"],
    )
    rules: MayChange[RuleTexts | None] = Field(
        default=None,
        description="partition rules instead of the checkpoint's: of dims (`embed=fsdp`), of activations "
        "(`act:seq=sp`), of leaves (`re:PATTERN=mp,fsdp`), or a preset (`flaxlm:1,1`). Other dims have the default "
        "rules",
        examples=[["embed=fsdp", "kv_heads=mp|none"]],
        json_schema_extra=if_absent("the checkpoint's"),
    )
    model: Model
    data: Data
    batch: MayChange[Batch]
    optimizer: AnyOptimizerTable = Field(
        description="The optimizer and its learning rate schedule."
    )
    lora: Lora = Lora()
    loss: Loss = Loss()
    train: Train
    eval: MayChange[Eval] = Eval()
    checkpoint: MayChange[Checkpoint] = Checkpoint()
    log: MayChange[Log] = Log()
    cluster: MayChange[Cluster] = Cluster()


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe. Constraints between keys are not part of it."""
    recipe_schema = Recipe.model_json_schema()
    # Defaults to the file's name.
    recipe_schema["required"].remove("name")
    return recipe_schema | {"title": "Recipe of prep train"}


def _schemas(table: type[BaseModel]) -> dict[str, KeySchema]:
    return table.model_json_schema()["properties"]


def _optimizer_schemas(tables: Mapping[str, Mapping[str, KeySchema]]) -> dict[str, KeySchema]:
    """Return the schemas of `[optimizer]`: first `type`, with all types, then all other keys.

    A key that several tables have is described by the first of them.
    """
    types = {name: schemas["type"] for name, schemas in tables.items()}
    descriptions = [f"`{name}`: {item['description']}" for name, item in types.items()]
    type_schema: KeySchema = {
        "enum": [*types],
        "type": "string",
        "default": DEFAULT_OPTIMIZER,
        "description": ". ".join(descriptions),
    }
    merged: dict[str, KeySchema] = {"type": type_schema}
    for schemas in tables.values():
        merged |= {key: schema for key, schema in schemas.items() if key not in merged}
    return merged


def _key_schemas() -> Iterator[tuple[str, KeySchema]]:
    """Yield dotted key and JSON schema of every key. Tables are not keys."""
    for name, item in _schemas(Recipe).items():
        annotation = Recipe.model_fields[name].annotation
        if name == "optimizer":
            schemas = _optimizer_schemas(OPTIMIZER_SCHEMAS)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            schemas = _schemas(annotation)
        else:
            yield name, item
            continue
        for key, schema in schemas.items():
            yield f"{name}.{key}", schema


# Type -> name of a key -> JSON schema
OPTIMIZER_SCHEMAS: Mapping[str, Mapping[str, KeySchema]] = {
    name: _schemas(table) for name, table in OPTIMIZER_TABLES.items()
}
# Dotted key -> JSON schema
KEY_SCHEMAS: Mapping[str, KeySchema] = dict(_key_schemas())
TABLE_NAMES = tuple(dict.fromkeys(key.partition(".")[0] for key in KEY_SCHEMAS if "." in key))


def example_line(key: str) -> str:
    """Return the line of a recipe with an example of a key, and its table."""
    table, _, name = key.rpartition(".")
    place = f" in [{table}]" if table else ""
    return f"`{name} = {to_toml(example_value(KEY_SCHEMAS[key]))}`{place}"


def is_path(key: str) -> bool:
    """Return whether a key's value is a path or a list of paths."""
    return any(schema.get("format") == "path" for schema in alternatives(KEY_SCHEMAS[key]))


def key_schemas_of(optimizer: str) -> dict[str, KeySchema]:
    """Return the JSON schema of every dotted key in a recipe with this optimizer type."""
    schemas: dict[str, KeySchema] = {}
    for key, schema in KEY_SCHEMAS.items():
        table, _, name = key.rpartition(".")
        # The schema of a table allows only its own type, and the schema of the key all types.
        if table != "optimizer" or name == "type":
            schemas[key] = schema
        elif name in OPTIMIZER_SCHEMAS[optimizer]:
            schemas[key] = OPTIMIZER_SCHEMAS[optimizer][name]
    return schemas


def keys_of(recipe: Recipe) -> Iterator[str]:
    """Yield the dotted keys of a recipe, without keys that only other optimizers have."""
    yield from key_schemas_of(recipe.optimizer.type)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    return attrgetter(key)(recipe)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Size of a training batch."""

    size: int  # Sequences per step
    accumulate: int  # Micro-batches per step

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch, over all devices."""
        return self.size // self.accumulate


def batch_shape(batch: Batch, *, n_devices: int, n_replicas: int) -> BatchShape:
    """Return the batch shape on a mesh.

    Args:
        batch: The recipe's `[batch]`.
        n_devices: Devices of the mesh.
        n_replicas: Data-parallel shards of a batch (dp x fsdp).

    Raises:
        UsageError: The batch is no whole number of micro-batches, or a micro-batch does not divide among the replicas.
    """
    # E.g. per_device 2 on 8 devices is a micro-batch of 16. With size 64 it is accumulated 4 times,
    # and with accumulate 4 the size is 64. With neither, the step is one micro-batch.
    origin = f"accumulate is {batch.accumulate}"
    micro_size = 0
    for name, noun, count in (
        ("per_replica", "replicas", n_replicas),
        ("per_device", "devices", n_devices),
    ):
        if rows := getattr(batch, name):
            micro_size = rows * count
            origin = f"{name} {rows} x {count} {noun} = {micro_size}"
    accumulate = batch.accumulate or 1
    size = batch.size or micro_size * accumulate
    divisor = micro_size or accumulate
    if size % divisor:
        # Each of `accumulate` micro-batches needs a row per replica.
        multiple = micro_size or accumulate * n_replicas
        raise usage_error(
            f"`batch.size` {size} is not a whole number of micro-batches",
            f"{origin}; {size} mod {divisor} = {size % divisor}",
            _size_hint(size, multiple),
        )
    if micro_size:
        accumulate = size // micro_size
    shape = BatchShape(size, accumulate)
    if remainder := shape.micro_batch_size % n_replicas:
        equation = f"`batch.size` {size} / accumulate {accumulate} = {shape.micro_batch_size}"
        raise usage_error(
            f"a micro-batch of {shape.micro_batch_size} does not divide among {n_replicas} replicas",
            f"{equation}; {shape.micro_batch_size} mod {n_replicas} = {remainder}",
            _size_hint(size, n_replicas * accumulate),
        )
    return shape


def _size_hint(size: int, multiple: int) -> Text:
    # E.g. 60 in multiples of 16: -60 // 16 = -4, and 4 * 16 = 64.
    rounded_up = -(-size // multiple) * multiple
    return text("{}", Key("batch.size", rounded_up, is_override=True))
