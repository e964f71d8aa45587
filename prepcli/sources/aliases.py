"""Short names of published checkpoints, with their model type, number of parameters and vocabulary size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name of a published checkpoint.

    `parameters` counts tied tensors once. `vocab` is the number of rows of the embedding.
    """

    name: str
    hub_id: str
    family: str  # model_type in its config.json
    parameters: int
    itemsize: int  # bytes per value in its files
    vocab: int

    @property
    def nbytes(self) -> int:
        """Size of all parameters in bytes, as published."""
        return self.parameters * self.itemsize


# fmt: off
ALIASES = (
    Alias("gpt2", "openai-community/gpt2", "gpt2", 124_439_808, 4, 50257),
    Alias("gpt2-medium", "openai-community/gpt2-medium", "gpt2", 354_823_168, 4, 50257),
    Alias("gpt2-large", "openai-community/gpt2-large", "gpt2", 774_030_080, 4, 50257),
    Alias("gpt2-xl", "openai-community/gpt2-xl", "gpt2", 1_557_611_200, 4, 50257),
    Alias("gpt-neo-125M", "EleutherAI/gpt-neo-125m", "gpt_neo", 125_198_592, 4, 50257),
    Alias("gpt-neo-1.3B", "EleutherAI/gpt-neo-1.3B", "gpt_neo", 1_315_575_808, 4, 50257),
    Alias("gpt-neo-2.7B", "EleutherAI/gpt-neo-2.7B", "gpt_neo", 2_651_307_520, 4, 50257),
    Alias("gpt-j-6b", "EleutherAI/gpt-j-6b", "gptj", 6_050_882_784, 4, 50400),
    Alias("codegen-350m-mono", "Salesforce/codegen-350M-mono", "codegen", 356_712_448, 2, 51200),
    Alias("codegen-2b-mono", "Salesforce/codegen-2B-mono", "codegen", 2_779_356_160, 2, 51200),
    Alias("codegen-6b-mono", "Salesforce/codegen-6B-mono", "codegen", 7_064_213_504, 2, 51200),
    Alias("codegen-16b-mono", "Salesforce/codegen-16B-mono", "codegen", 16_032_155_648, 2, 51200),
    Alias("pythia-70m", "EleutherAI/pythia-70m", "gpt_neox", 70_426_624, 2, 50304),
    Alias("pythia-160m", "EleutherAI/pythia-160m", "gpt_neox", 162_322_944, 2, 50304),
    Alias("pythia-410m", "EleutherAI/pythia-410m", "gpt_neox", 405_334_016, 2, 50304),
    Alias("pythia-1b", "EleutherAI/pythia-1b", "gpt_neox", 1_011_781_632, 2, 50304),
    Alias("pythia-1.4b", "EleutherAI/pythia-1.4b", "gpt_neox", 1_414_647_808, 2, 50304),
    Alias("pythia-2.8b", "EleutherAI/pythia-2.8b", "gpt_neox", 2_775_208_960, 2, 50304),
    Alias("pythia-6.9b", "EleutherAI/pythia-6.9b", "gpt_neox", 6_857_302_016, 2, 50432),
    Alias("pythia-12b", "EleutherAI/pythia-12b", "gpt_neox", 11_846_072_320, 2, 50688),
    Alias("gpt-neox-20b", "EleutherAI/gpt-neox-20b", "gpt_neox", 20_554_567_680, 2, 50432),
    Alias("opt-125m", "facebook/opt-125m", "opt", 125_239_296, 2, 50272),
    Alias("opt-350m", "facebook/opt-350m", "opt", 331_196_416, 2, 50272),
    Alias("opt-1.3b", "facebook/opt-1.3b", "opt", 1_315_758_080, 2, 50272),
    Alias("opt-2.7b", "facebook/opt-2.7b", "opt", 2_651_596_800, 2, 50272),
    Alias("opt-6.7b", "facebook/opt-6.7b", "opt", 6_658_473_984, 2, 50272),
    Alias("opt-13b", "facebook/opt-13b", "opt", 12_853_473_280, 2, 50272),
    Alias("opt-30b", "facebook/opt-30b", "opt", 29_974_540_288, 2, 50272),
    Alias("opt-66b", "facebook/opt-66b", "opt", 65_719_701_504, 2, 50272),
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
    Alias("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", "llama", 8_030_261_248, 2, 128256),
    Alias("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 2, 128256),
    Alias("llama-3.1-405b", "meta-llama/Llama-3.1-405B", "llama", 405_853_388_800, 2, 128256),
    Alias("llama-3.2-1b", "meta-llama/Llama-3.2-1B", "llama", 1_235_814_400, 2, 128256),
    Alias("llama-3.2-3b", "meta-llama/Llama-3.2-3B", "llama", 3_212_749_824, 2, 128256),
    Alias("llama-3.3-70b-instruct", "meta-llama/Llama-3.3-70B-Instruct", "llama", 70_553_706_496, 2, 128256),
    Alias("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", "llama", 134_515_008, 2, 49152),
    Alias("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", "llama", 361_821_120, 2, 49152),
    Alias("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", "llama", 1_711_376_384, 2, 49152),
    Alias("mistral-7b", "mistralai/Mistral-7B-v0.1", "mistral", 7_241_732_096, 2, 32000),
    Alias("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", "mistral", 7_248_023_552, 2, 32768),
    Alias("mistral-nemo-12b", "mistralai/Mistral-Nemo-Base-2407", "mistral", 12_247_782_400, 2, 131072),
    Alias("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", "mixtral", 46_702_792_704, 2, 32000),
    Alias("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", "mixtral", 140_620_634_112, 2, 32000),
    Alias("qwen2-0.5b", "Qwen/Qwen2-0.5B", "qwen2", 494_032_768, 2, 151936),
    Alias("qwen2-1.5b", "Qwen/Qwen2-1.5B", "qwen2", 1_543_714_304, 2, 151936),
    Alias("qwen2-7b", "Qwen/Qwen2-7B", "qwen2", 7_615_616_512, 2, 152064),
    Alias("qwen2-72b", "Qwen/Qwen2-72B", "qwen2", 72_706_203_648, 2, 152064),
    Alias("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "qwen2", 494_032_768, 2, 151936),
    Alias("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", "qwen2", 1_543_714_304, 2, 151936),
    Alias("qwen2.5-3b", "Qwen/Qwen2.5-3B", "qwen2", 3_085_938_688, 2, 151936),
    Alias("qwen2.5-7b", "Qwen/Qwen2.5-7B", "qwen2", 7_615_616_512, 2, 152064),
    Alias("qwen2.5-14b", "Qwen/Qwen2.5-14B", "qwen2", 14_770_033_664, 2, 152064),
    Alias("qwen2.5-32b", "Qwen/Qwen2.5-32B", "qwen2", 32_763_876_352, 2, 152064),
    Alias("qwen2.5-72b", "Qwen/Qwen2.5-72B", "qwen2", 72_706_203_648, 2, 152064),
    Alias("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3", 596_049_920, 2, 151936),
    Alias("qwen3-1.7b", "Qwen/Qwen3-1.7B", "qwen3", 1_720_574_976, 2, 151936),
    Alias("qwen3-4b", "Qwen/Qwen3-4B", "qwen3", 4_022_468_096, 2, 151936),
    Alias("qwen3-8b", "Qwen/Qwen3-8B", "qwen3", 8_190_735_360, 2, 151936),
    Alias("qwen3-14b", "Qwen/Qwen3-14B", "qwen3", 14_768_307_200, 2, 151936),
    Alias("qwen3-32b", "Qwen/Qwen3-32B", "qwen3", 32_762_123_264, 2, 151936),
    Alias("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "qwen3_moe", 30_532_122_624, 2, 151936),
    Alias("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "qwen3_moe", 235_093_634_560, 2, 151936),
    Alias("gemma-2b", "google/gemma-2b", "gemma", 2_506_172_416, 2, 256000),
    Alias("gemma-7b", "google/gemma-7b", "gemma", 8_537_680_896, 2, 256000),
    Alias("gemma-2-2b", "google/gemma-2-2b", "gemma2", 2_614_341_888, 4, 256000),
    Alias("gemma-2-9b", "google/gemma-2-9b", "gemma2", 9_241_705_984, 4, 256000),
    Alias("gemma-2-27b", "google/gemma-2-27b", "gemma2", 27_227_128_320, 4, 256000),
    Alias("gemma-3-270m", "google/gemma-3-270m", "gemma3_text", 268_098_176, 2, 262144),
    Alias("gemma-3-1b", "google/gemma-3-1b-pt", "gemma3_text", 999_885_952, 2, 262144),
    Alias("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", "phi3", 3_821_079_552, 2, 32064),
    Alias("phi-3-medium", "microsoft/Phi-3-medium-4k-instruct", "phi3", 13_960_238_080, 2, 32064),
    Alias("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct", "phi3", 3_821_079_552, 2, 32064),
    Alias("phi-4", "microsoft/phi-4", "phi3", 14_659_507_200, 2, 100352),
    Alias("phi-4-mini", "microsoft/Phi-4-mini-instruct", "phi3", 3_836_021_760, 2, 200064),
    Alias("t5-small", "google-t5/t5-small", "t5", 60_506_624, 4, 32128),
    Alias("t5-base", "google-t5/t5-base", "t5", 222_903_552, 4, 32128),
    Alias("t5-large", "google-t5/t5-large", "t5", 737_668_096, 4, 32128),
    Alias("t5-3b", "google-t5/t5-3b", "t5", 2_851_598_336, 4, 32128),
    Alias("t5-11b", "google-t5/t5-11b", "t5", 11_307_321_344, 4, 32128),
    Alias("t5-v1_1-small", "google/t5-v1_1-small", "t5", 76_961_152, 4, 32128),
    Alias("t5-v1_1-base", "google/t5-v1_1-base", "t5", 247_577_856, 4, 32128),
    Alias("t5-v1_1-large", "google/t5-v1_1-large", "t5", 783_150_080, 4, 32128),
    Alias("t5-v1_1-xl", "google/t5-v1_1-xl", "t5", 2_849_757_184, 4, 32128),
    Alias("t5-v1_1-xxl", "google/t5-v1_1-xxl", "t5", 11_135_332_352, 4, 32128),
    Alias("flan-t5-small", "google/flan-t5-small", "t5", 76_961_152, 4, 32128),
    Alias("flan-t5-base", "google/flan-t5-base", "t5", 247_577_856, 4, 32128),
    Alias("flan-t5-large", "google/flan-t5-large", "t5", 783_150_080, 4, 32128),
    Alias("flan-t5-xl", "google/flan-t5-xl", "t5", 2_849_757_184, 4, 32128),
    Alias("flan-t5-xxl", "google/flan-t5-xxl", "t5", 11_135_332_352, 4, 32128),
    Alias("mt5-small", "google/mt5-small", "mt5", 300_176_768, 4, 250112),
    Alias("mt5-base", "google/mt5-base", "mt5", 582_401_280, 4, 250112),
    Alias("mt5-large", "google/mt5-large", "mt5", 1_229_581_312, 4, 250112),
    Alias("mt5-xl", "google/mt5-xl", "mt5", 3_742_619_648, 4, 250112),
    Alias("mt5-xxl", "google/mt5-xxl", "mt5", 12_921_057_280, 4, 250112),
    Alias("olmo-2-7b", "allenai/OLMo-2-1124-7B", "olmo2", 7_298_617_344, 4, 100352),
    Alias("olmo-2-13b", "allenai/OLMo-2-1124-13B", "olmo2", 13_716_198_400, 4, 100352),
    Alias("olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924", "olmoe", 6_919_161_856, 2, 50304),
    Alias("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "smollm3", 3_075_098_624, 2, 128256),
    Alias("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe", 14_315_784_192, 2, 151936),
    Alias("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", 15_706_484_224, 2, 102400),
    Alias("glm-4-9b", "THUDM/glm-4-9b-chat-hf", "glm", 9_399_951_360, 2, 151552),
    Alias("ernie-4.5-0.3b", "baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", 360_748_032, 2, 103424),
    Alias("ernie-4.5-21b-a3b", "baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe", 21_825_437_888, 2, 103424),
    Alias("helium-2b", "kyutai/helium-1-preview-2b", "helium", 2_172_643_840, 2, 48000),
    Alias("command-r", "CohereForAI/c4ai-command-r-v01", "cohere", 34_980_831_232, 2, 256000),
    Alias("phi-1.5", "microsoft/phi-1_5", "phi", 1_418_270_720, 2, 51200),
    Alias("phi-2", "microsoft/phi-2", "phi", 2_779_683_840, 2, 51200),
    Alias("stablelm-3b", "stabilityai/stablelm-3b-4e1t", "stablelm", 2_795_443_200, 2, 50304),
    Alias("starcoder2-3b", "bigcode/starcoder2-3b", "starcoder2", 3_030_371_328, 4, 49152),
    Alias("falcon-7b", "tiiuae/falcon-7b", "falcon", 6_921_720_704, 2, 65024),
    Alias("biogpt", "microsoft/biogpt", "biogpt", 346_763_264, 4, 42384),
    Alias("xglm-564m", "facebook/xglm-564M", "xglm", 564_463_616, 2, 256008),
)
# fmt: on

ALIASES_BY_NAME = {alias.name: alias for alias in ALIASES}
ALIAS_FAMILIES = tuple(dict.fromkeys(alias.family for alias in ALIASES))
