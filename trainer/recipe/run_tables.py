"""Tables of a recipe for evaluation, checkpoints, logs and processes: they change no step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from prepcli.core.process_address import DEFAULT_PORT, ProcessSettings
from trainer.recipe.key_types import (
    STRICT,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Prompts,
    if_absent,
)

Direction = Literal["lowest", "highest"]
EVAL_LOSS = "eval_loss"
# The values of each evaluation that can select a step, and which of them is the best.
EVAL_METRICS: Mapping[str, Direction] = {
    EVAL_LOSS: "lowest",
    "eval_perplexity": "lowest",
    "eval_accuracy": "highest",
}


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


class Log(BaseModel):
    """The processes that print and write metrics, logs beside `metrics.jsonl`, and texts to generate during a run."""

    model_config = STRICT

    all_workers: bool = Field(
        default=False,
        description="print the lines of every process, and write a metrics file for each. `false`: only for process 0",
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
