"""Short names of the checkpoints that prep is made for, and what is known of them without any file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A published checkpoint; `parameters` counts tied tensors once, `vocab` is the true size, without padding."""

    name: str
    hub_id: str
    family: str  # model_type in its config.json
    parameters: int
    itemsize: int  # bytes a value of its files
    vocab: int

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as published."""
        return self.parameters * self.itemsize


ALIASES = (
    Alias("gpt2", "openai-community/gpt2", "gpt2", 124_439_808, 4, 50257),
    Alias("gpt2-medium", "openai-community/gpt2-medium", "gpt2", 354_823_168, 4, 50257),
    Alias("gpt2-large", "openai-community/gpt2-large", "gpt2", 774_030_080, 4, 50257),
    Alias("gpt2-xl", "openai-community/gpt2-xl", "gpt2", 1_557_611_200, 4, 50257),
    Alias("gpt-neo-125M", "EleutherAI/gpt-neo-125m", "gpt_neo", 125_198_592, 4, 50257),
    Alias("gpt-neo-1.3B", "EleutherAI/gpt-neo-1.3B", "gpt_neo", 1_315_575_808, 4, 50257),
    Alias("gpt-neo-2.7B", "EleutherAI/gpt-neo-2.7B", "gpt_neo", 2_651_307_520, 4, 50257),
    Alias("llama-7b", "huggyllama/llama-7b", "llama", 6_738_415_616, 2, 32000),
    Alias("llama-13b", "huggyllama/llama-13b", "llama", 13_015_864_320, 2, 32000),
    Alias("llama-30b", "huggyllama/llama-30b", "llama", 32_528_943_616, 2, 32000),
    Alias("llama-65b", "huggyllama/llama-65b", "llama", 65_285_660_672, 2, 32000),
    Alias("llama-2-7b", "meta-llama/Llama-2-7b-hf", "llama", 6_738_415_616, 2, 32000),
    Alias("llama-2-13b", "meta-llama/Llama-2-13b-hf", "llama", 13_015_864_320, 2, 32000),
    Alias("llama-2-70b", "meta-llama/Llama-2-70b-hf", "llama", 68_976_648_192, 2, 32000),
    Alias("llama-3-8b", "meta-llama/Meta-Llama-3-8B", "llama", 8_030_261_248, 2, 128256),
    Alias("llama-3-70b", "meta-llama/Meta-Llama-3-70B", "llama", 70_553_706_496, 2, 128256),
    Alias("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, 2, 128256),
    Alias("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 2, 128256),
    Alias("llama-3.1-405b", "meta-llama/Llama-3.1-405B", "llama", 405_853_388_800, 2, 128256),
    Alias("llama-3.2-1b", "meta-llama/Llama-3.2-1B", "llama", 1_235_814_400, 2, 128256),
    Alias("llama-3.2-3b", "meta-llama/Llama-3.2-3B", "llama", 3_212_749_824, 2, 128256),
)

BY_NAME = {alias.name: alias for alias in ALIASES}
FAMILIES = tuple(dict.fromkeys(alias.family for alias in ALIASES))
