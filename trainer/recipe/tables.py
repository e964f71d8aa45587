"""The tables of a recipe as pydantic models: type, default and description of each key.

Error messages, docs/reference/recipes.md and the JSON schema are generated from these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field

from trainer.recipe.data_table import Data
from trainer.recipe.key_schema import KeySchema, alternatives
from trainer.recipe.key_types import (
    STRICT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProfileSteps,
    RuleTexts,
    UnitInterval,
    if_absent,
)
from trainer.recipe.lora_table import Lora
from trainer.recipe.model_table import Model
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AnyOptimizerTable
from trainer.recipe.run_tables import Checkpoint, Cluster, Eval, Log


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


class Train(BaseModel):
    """The length of the run, and how often it logs and evaluates. Set either `steps` or `epochs`."""

    model_config = STRICT

    steps: PositiveInt | None = Field(
        default=None,
        description="optimizer steps of the run",
        examples=[1000],
        json_schema_extra=if_absent("from `epochs`"),
    )
    epochs: PositiveFloat | None = Field(
        default=None,
        description="passes over the sequences",
        examples=[3],
        json_schema_extra=if_absent("from `steps`"),
    )
    log_every: PositiveInt = Field(
        default=10, description="steps between two log lines", examples=[10]
    )
    eval_every: NonNegativeInt = Field(
        default=0,
        description="steps between two evaluations. `0`: only at the end, if there is evaluation data",
        examples=[500],
    )
    eval_every_epochs: PositiveFloat | None = Field(
        default=None,
        description="passes over the sequences between two evaluations",
        examples=[0.5],
        json_schema_extra=if_absent("from `eval_every`"),
    )
    profile: ProfileSteps | None = Field(
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
    max_skipped: PositiveInt = Field(
        default=10,
        description="consecutive skipped steps after which the run ends. A step is skipped if its loss or"
        " gradients are not finite, or if no token has a weight",
        examples=[10],
    )


class Recipe(BaseModel):
    """Name, random seed, device mesh and partition rules of the run."""

    model_config = STRICT

    name: str = Field(
        pattern=r"^[^\s./\\-][^/\\\x00-\x1f\x7f]*$",
        description="name of the run, a plain folder name",
        examples=["first-run"],
        json_schema_extra=if_absent("the recipe's file name"),
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0,
        description="seed of the order of sequences and of all other random numbers",
        examples=[42],
    )
    mesh: str = Field(
        "-1,1,1",
        description="sizes `dp,fsdp,mp`, or names and sizes: `fsdp:64,mp:4,sp:2`. One size may be -1: all remaining "
        "devices. `sp` splits the tokens of a sequence",
        examples=["1,8,1"],
    )
    rules: RuleTexts | None = Field(
        default=None,
        description="partition rules instead of the checkpoint's: of dims (`embed=fsdp`), of activations "
        "(`act:seq=sp`), of leaves (`re:PATTERN=mp,fsdp`), or a preset (`flaxlm:1,1`). Other dims have the default "
        "rules",
        examples=[["embed=fsdp", "kv_heads=mp|none"]],
        json_schema_extra=if_absent("the checkpoint's"),
    )
    model: Model
    data: Data
    batch: Batch
    optimizer: AnyOptimizerTable = Field(
        description="The optimizer and its learning rate schedule."
    )
    lora: Lora = Lora()
    loss: Loss = Loss()
    train: Train
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    cluster: Cluster = Cluster()


def schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe. Constraints between keys are not part of it."""
    recipe_schema = Recipe.model_json_schema()
    # Defaults to the file's name.
    recipe_schema["required"].remove("name")
    return recipe_schema | {"title": "Recipe of prep train"}


def table_members(recipe_schema: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of a table: one, or one per member of a tagged union. Empty for a key."""
    property_schema = recipe_schema["properties"][name]
    members: list[Mapping[str, Any]] = []
    for schema_or_reference in (property_schema, *property_schema.get("oneOf", ())):
        # E.g. "#/$defs/AdamWTable".
        reference = schema_or_reference.get("$ref")
        if reference is not None:
            members.append(recipe_schema["$defs"][reference.rpartition("/")[2]])
    return members


def _leaf_schemas(recipe_schema: Mapping[str, Any]) -> Iterator[tuple[str, KeySchema]]:
    """Yield dotted key and JSON schema of every key. Tables are not keys."""
    for name, property_schema in recipe_schema["properties"].items():
        members = [member["properties"] for member in table_members(recipe_schema, name)]
        if not members:
            yield name, property_schema
            continue
        leaf_schemas = members[0]
        if "oneOf" in property_schema:
            leaf_schemas = merge_members(members)
        for key, leaf_schema in leaf_schemas.items():
            yield f"{name}.{key}", leaf_schema


def merge_members(members: Sequence[Mapping[str, KeySchema]]) -> dict[str, KeySchema]:
    """Return the key schemas of a union's members by name: first `type`, with all alternatives, then all other keys.

    A key that several members have is described by the first of them.
    """
    types = [member["type"] for member in members]
    names = [alternatives(type_schema)[0].get("const") for type_schema in types]
    description = ". ".join(f"`{name}`: {item['description']}" for name, item in zip(names, types))
    type_key = {
        "enum": names,
        "type": "string",
        "default": types[0].get("default"),
        "description": description,
    }
    merged = {"type": cast(KeySchema, type_key)}
    for member in members:
        merged |= {key: leaf_schema for key, leaf_schema in member.items() if key not in merged}
    return merged


# Dotted key -> JSON schema.
KEY_SCHEMAS: Mapping[str, KeySchema] = dict(_leaf_schemas(schema()))


def _optimizer_schemas() -> Iterator[tuple[str, Mapping[str, KeySchema]]]:
    """Yield each optimizer type with the JSON schemas of its keys, by key name."""
    members = table_members(schema(), "optimizer")
    # pydantic lists the members of a union in the order of its type, which is the order of OPTIMIZER_TABLES.
    for name, member in zip(OPTIMIZER_TABLES, members, strict=True):
        # The schema of a member allows only its own type. The schema of the key allows all types.
        yield name, {**member["properties"], "type": KEY_SCHEMAS["optimizer.type"]}


# Type -> name of a key -> JSON schema.
OPTIMIZER_SCHEMAS: Mapping[str, Mapping[str, KeySchema]] = dict(_optimizer_schemas())
TABLE_NAMES = tuple(dict.fromkeys(key.partition(".")[0] for key in KEY_SCHEMAS if "." in key))


def is_path(key: str) -> bool:
    """Return whether a key's value is a path or a list of paths."""
    return any(
        alternative.get("format") == "path" for alternative in alternatives(KEY_SCHEMAS[key])
    )


def key_schemas_of(optimizer: str) -> dict[str, KeySchema]:
    """Return the JSON schema of every dotted key in a recipe with this optimizer type."""
    schemas: dict[str, KeySchema] = {}
    for key, item in KEY_SCHEMAS.items():
        table, _, name = key.rpartition(".")
        if table != "optimizer":
            schemas[key] = item
        elif name in OPTIMIZER_SCHEMAS[optimizer]:
            schemas[key] = OPTIMIZER_SCHEMAS[optimizer][name]
    return schemas


def keys_of(recipe: Recipe) -> Iterator[str]:
    """Yield the dotted keys of a recipe, without keys that only other optimizers have."""
    yield from key_schemas_of(recipe.optimizer.type)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value
