"""The mark of each public name: stable, or provisional. docs/reference/stability.md says what it promises.

A new name is provisional. Move it to STABLE when a release has shipped it, and no change of it is planned.
"""

from __future__ import annotations

STABLE = {
    "pad_vocab", "add_tokens", "remove_tokens", "save_init", "reshard", "export", "merge", "Conversion",
    "PadVocabOptions", "AddTokensOptions", "RemoveTokensOptions", "SaveInitOptions", "ReshardOptions",
    "ExportOptions", "MergeOptions",
    "SourceOptions", "ConversionOptions", "RerunOptions", "DropOptions", "NewRowOptions", "LayoutOptions",
    "StrictOptions", "VerbatimOptions",
    "verify", "VerifyOptions", "Verification", "TensorDifference",
    "inspect", "InspectOptions", "Inspection", "TensorSummary",
    "lock", "LockOptions", "LockedModel",
    "load_params", "save_params",
    "batches", "DataOptions", "Batches",
    "train", "TrainOptions", "TrainingRun",
    "generate", "GenerateOptions", "Generation",
    "Progress", "PrepError", "UsageError", "DamagedError", "OutputExistsError",
    "__version__",
}  # fmt: skip
PROVISIONAL = {
    "Plan", "Observer", "NewTokens", "BatchDigest", "TowersOptions", "TrainingStateOptions",
    "AcceptedChange", "LeftOutTensor", "OldAndNew", "SettingDifference", "TensorDistance",
    "suggest_map", "SuggestMapOptions", "MapSuggestion", "MapOptions", "ExportMapOptions",
    "verify_logits", "LogitsOptions", "LogitComparison", "PromptComparison",
    "verify_chain", "ChainOptions", "Chain", "ChainLink",
    "roundtrip", "RoundtripOptions", "Roundtrip", "RoundtripWay",
    "nnx_model", "linen_model", "ModuleOptions", "from_hf_flax", "to_hf_flax",
    "tokenize_shard", "Tokenization", "TokenizedData", "TokenSample", "SampleCounts", "SamplePart",
    "evaluate", "EvaluateOptions", "Evaluation", "EvaluationScores", "harness_model",
    "plan", "PlanOptions", "StepPlan", "report", "RunsReport",
    "check_family", "scale_down", "CheckResult",
}  # fmt: skip


def mark_of(name: str) -> str:
    """Return the mark of a public name, "Stable" or "Provisional"."""
    return "Stable" if name in STABLE else "Provisional"
