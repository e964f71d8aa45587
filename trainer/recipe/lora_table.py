"""The recipe table `[lora]`: low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from prepcli.models.lora_config import DEFAULT_TARGETS, LoraConfig
from trainer.recipe.key_types import (
    STRICT,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    RuleTexts,
    UnitInterval,
    if_absent,
)

# Default of `alpha`.
# The scale alpha / rank is then 2 for every rank.
ALPHA_PER_RANK = 2


class Lora(BaseModel):
    """Low-rank adapters (LoRA). With `rank` or `path` only they are trained. All other parameters are frozen."""

    model_config = STRICT

    rank: NonNegativeInt = Field(
        default=0,
        description="rank of the adapters. `0`: none, all parameters are trained",
        examples=[16],
    )
    alpha: PositiveFloat | None = Field(
        default=None,
        description="scale of the adapters: alpha / rank times B A is added to a weight",
        examples=[32],
        json_schema_extra=if_absent("2 x `rank`"),
    )
    targets: RuleTexts = Field(
        default=DEFAULT_TARGETS,
        description="projections with an adapter, as patterns: `attn.q`, `attn.k`, `attn.v`, `attn.o`, `cross.*`, "
        "`mlp.gate`, `mlp.up`, `mlp.down`. Those that the checkpoint stores in one tensor are adapted together. "
        "In latent attention (DeepSeek) `attn.q` is `attn.q_up`, and `attn.k` and `attn.v` are `attn.kv_up`. "
        "`all-linear`: all projections of the layers, without experts and head, as in PEFT",
        examples=[["attn.*", "mlp.*"], "all-linear"],
    )
    target_parameters: RuleTexts = Field(
        default=(),
        description="projections of experts with an adapter for each expert, as patterns: `mlp.gate`, `mlp.up`, "
        "`mlp.down`. PEFT has this key for experts in one tensor",
        examples=[["mlp.*"]],
    )
    dropout: UnitInterval = Field(
        default=0.0,
        description="fraction of the input of each adapter to drop in training. Evaluation drops none",
        examples=[0.05],
    )
    rank_pattern: dict[str, PositiveInt] = Field(
        default={},
        description="rank of some adapters in place of `rank`, by a regular expression. An adapter has the rank of the "
        "first key that is the end of its name, as in PEFT: `attn.q`, or the PyTorch module's `q_proj`",
        examples=[{"mlp.down": 32}],
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        default={},
        description="alpha of some adapters in place of `alpha`, by a regular expression as in `rank_pattern`",
        examples=[{"mlp.down": 64}],
    )
    modules_to_save: RuleTexts = Field(
        default=(),
        description="embeddings and head that are trained as a whole: `embed.tokens`, `embed.positions`, `head`. A "
        "tied head is trained with `embed.tokens`",
        examples=[["embed.tokens", "head"]],
    )
    use_rslora: bool = Field(
        default=False,
        description="scale by alpha / sqrt(rank) instead of alpha / rank",
        examples=[True],
    )
    path: PathText | None = Field(
        default=None,
        description="adapter in the format of PEFT to start from: a folder. It sets all keys above",
        examples=["my-adapter"],
        json_schema_extra=if_absent("new adapters"),
    )
    base_dtype: Literal["stored", "float32", "bfloat16"] = Field(
        default="stored",
        description="dtype of the frozen parameters in device memory. `stored`: that of the checkpoint",
        examples=["bfloat16"],
    )

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained."""
        return bool(self.rank or self.path)

    @property
    def new_adapters(self) -> LoraConfig | None:
        """Settings of new adapters. None without adapters, or if the adapters are loaded from `path`."""
        if not self.rank:
            return None
        alpha = self.alpha or float(ALPHA_PER_RANK * self.rank)
        return LoraConfig(
            self.rank,
            alpha,
            targets=self.targets,
            use_rslora=self.use_rslora,
            dropout=self.dropout,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
            modules_to_save=self.modules_to_save,
            target_parameters=self.target_parameters,
        )
