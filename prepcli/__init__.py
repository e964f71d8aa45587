"""prep: prepare language-model checkpoints for JAX and train from them.

Public functions print no text, return typed results and raise `PrepError`. The types of their options and results are
exported for annotations. Everything else is internal.

    import prepcli as prep

    padded = prep.pad_vocab("gpt-neo-1.3B", multiple=8)
    init = prep.save_init(padded.path, mesh="1,1,8")
    params = prep.load_params(init.path, mesh="1,1,8")
"""

from __future__ import annotations

# Not from `typing`, which imports for long: only after this module, Ctrl-C ends `prep` without a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from prepcli.console.observer import Observer
    from prepcli.console.progress import Progress
    from prepcli.errors import DamagedError, OutputExistsError, PrepError, UsageError
    from prepcli.operations.add_tokens import add_tokens
    from prepcli.operations.batches import BatchDigest, Batches, batches
    from prepcli.operations.chain import verify_chain
    from prepcli.operations.compute_options import EvaluateOptions, GenerateOptions, TrainOptions
    from prepcli.operations.data_options import DataOptions
    from prepcli.operations.evaluate import evaluate
    from prepcli.operations.export import export
    from prepcli.operations.flax_models import from_hf_flax, linen_model, nnx_model, to_hf_flax
    from prepcli.operations.generate import generate
    from prepcli.operations.harness_model import harness_model
    from prepcli.operations.inspect import inspect
    from prepcli.operations.inspection_options import (
        ChainOptions,
        InspectOptions,
        LockOptions,
        LogitsOptions,
        PlanOptions,
        RoundtripOptions,
        VerifyOptions,
    )
    from prepcli.operations.load_params import load_params
    from prepcli.operations.lock import lock
    from prepcli.operations.map_options import ExportMapOptions, MapOptions
    from prepcli.operations.merge import merge
    from prepcli.operations.options import (
        ConversionOptions,
        DropOptions,
        ExportOptions,
        LayoutOptions,
        MergeOptions,
        ModuleOptions,
        NewRowOptions,
        PadVocabOptions,
        RerunOptions,
        ReshardOptions,
        SaveInitOptions,
        SourceOptions,
        VerbatimOptions,
    )
    from prepcli.operations.pad_vocab import pad_vocab
    from prepcli.operations.plan import plan
    from prepcli.operations.remove_tokens import remove_tokens
    from prepcli.operations.report import report
    from prepcli.operations.results import (
        Chain,
        ChainLink,
        Conversion,
        Evaluation,
        EvaluationScores,
        Generation,
        Inspection,
        LockedModel,
        MapSuggestion,
        NewTokens,
        Roundtrip,
        RoundtripWay,
        RunsReport,
        StepPlan,
        TensorSummary,
        Tokenization,
        TokenizedData,
        TrainingRun,
    )
    from prepcli.operations.roundtrip import roundtrip
    from prepcli.operations.save_init import reshard, save_init
    from prepcli.operations.save_params import save_params
    from prepcli.operations.strict_options import StrictOptions
    from prepcli.operations.suggest_map import suggest_map
    from prepcli.operations.suggestion_options import SuggestMapOptions
    from prepcli.operations.token_options import AddTokensOptions, RemoveTokensOptions
    from prepcli.operations.tokenize import SampleCounts, SamplePart, TokenSample, tokenize_shard
    from prepcli.operations.towers_options import TowersOptions
    from prepcli.operations.train import train
    from prepcli.operations.training_state_options import TrainingStateOptions
    from prepcli.operations.verification_results import (
        AcceptedChange,
        LeftOutTensor,
        LogitComparison,
        OldAndNew,
        PromptComparison,
        SettingDifference,
        TensorDifference,
        TensorDistance,
        Verification,
    )
    from prepcli.operations.verify import verify
    from prepcli.operations.verify_logits import verify_logits
    from prepcli.planning.plan import Plan

    __version__: str

__all__ = [
    "AcceptedChange",
    "AddTokensOptions",
    "BatchDigest",
    "Batches",
    "Chain",
    "ChainLink",
    "ChainOptions",
    "Conversion",
    "ConversionOptions",
    "DamagedError",
    "DataOptions",
    "DropOptions",
    "EvaluateOptions",
    "Evaluation",
    "EvaluationScores",
    "ExportMapOptions",
    "ExportOptions",
    "GenerateOptions",
    "Generation",
    "InspectOptions",
    "Inspection",
    "LayoutOptions",
    "LeftOutTensor",
    "LockOptions",
    "LockedModel",
    "LogitComparison",
    "LogitsOptions",
    "MapOptions",
    "MapSuggestion",
    "MergeOptions",
    "ModuleOptions",
    "NewRowOptions",
    "NewTokens",
    "Observer",
    "OldAndNew",
    "OutputExistsError",
    "PadVocabOptions",
    "Plan",
    "PlanOptions",
    "PrepError",
    "Progress",
    "PromptComparison",
    "RemoveTokensOptions",
    "RerunOptions",
    "ReshardOptions",
    "Roundtrip",
    "RoundtripOptions",
    "RoundtripWay",
    "RunsReport",
    "SampleCounts",
    "SamplePart",
    "SaveInitOptions",
    "SettingDifference",
    "SourceOptions",
    "StepPlan",
    "StrictOptions",
    "SuggestMapOptions",
    "TensorDifference",
    "TensorDistance",
    "TensorSummary",
    "TokenSample",
    "Tokenization",
    "TokenizedData",
    "TowersOptions",
    "TrainOptions",
    "TrainingRun",
    "TrainingStateOptions",
    "UsageError",
    "VerbatimOptions",
    "Verification",
    "VerifyOptions",
    "__version__",
    "add_tokens",
    "batches",
    "evaluate",
    "export",
    "from_hf_flax",
    "generate",
    "harness_model",
    "inspect",
    "linen_model",
    "load_params",
    "lock",
    "merge",
    "nnx_model",
    "pad_vocab",
    "plan",
    "remove_tokens",
    "report",
    "reshard",
    "roundtrip",
    "save_init",
    "save_params",
    "suggest_map",
    "to_hf_flax",
    "tokenize_shard",
    "train",
    "verify",
    "verify_chain",
    "verify_logits",
]

_MODULES = {
    "prepcli.operations.add_tokens": ("add_tokens",),
    "prepcli.operations.batches": ("BatchDigest", "Batches", "batches"),
    "prepcli.operations.data_options": ("DataOptions",),
    "prepcli.operations.compute_options": ("EvaluateOptions", "GenerateOptions", "TrainOptions"),
    "prepcli.operations.options": (
        "ConversionOptions",
        "DropOptions",
        "ExportOptions",
        "LayoutOptions",
        "MergeOptions",
        "ModuleOptions",
        "NewRowOptions",
        "PadVocabOptions",
        "RerunOptions",
        "ReshardOptions",
        "SaveInitOptions",
        "SourceOptions",
        "VerbatimOptions",
    ),
    "prepcli.operations.token_options": ("AddTokensOptions", "RemoveTokensOptions"),
    "prepcli.operations.strict_options": ("StrictOptions",),
    "prepcli.operations.towers_options": ("TowersOptions",),
    "prepcli.operations.map_options": ("ExportMapOptions", "MapOptions"),
    "prepcli.operations.suggestion_options": ("SuggestMapOptions",),
    "prepcli.operations.training_state_options": ("TrainingStateOptions",),
    "prepcli.operations.inspect": ("inspect",),
    "prepcli.operations.inspection_options": (
        "ChainOptions",
        "InspectOptions",
        "LockOptions",
        "LogitsOptions",
        "PlanOptions",
        "RoundtripOptions",
        "VerifyOptions",
    ),
    "prepcli.operations.plan": ("plan",),
    "prepcli.operations.report": ("report",),
    "prepcli.operations.results": (
        "Chain",
        "ChainLink",
        "Conversion",
        "Evaluation",
        "EvaluationScores",
        "Generation",
        "Inspection",
        "LockedModel",
        "MapSuggestion",
        "NewTokens",
        "Roundtrip",
        "RoundtripWay",
        "RunsReport",
        "StepPlan",
        "TensorSummary",
        "Tokenization",
        "TokenizedData",
        "TrainingRun",
    ),
    "prepcli.operations.verification_results": (
        "AcceptedChange",
        "LeftOutTensor",
        "LogitComparison",
        "OldAndNew",
        "PromptComparison",
        "SettingDifference",
        "TensorDifference",
        "TensorDistance",
        "Verification",
    ),
    "prepcli.console.observer": ("Observer",),
    "prepcli.console.progress": ("Progress",),
    "prepcli.operations.chain": ("verify_chain",),
    "prepcli.operations.evaluate": ("evaluate",),
    "prepcli.operations.export": ("export",),
    "prepcli.operations.flax_models": ("from_hf_flax", "linen_model", "nnx_model", "to_hf_flax"),
    "prepcli.operations.generate": ("generate",),
    "prepcli.operations.harness_model": ("harness_model",),
    "prepcli.operations.load_params": ("load_params",),
    "prepcli.operations.lock": ("lock",),
    "prepcli.operations.merge": ("merge",),
    "prepcli.operations.pad_vocab": ("pad_vocab",),
    "prepcli.operations.remove_tokens": ("remove_tokens",),
    "prepcli.operations.roundtrip": ("roundtrip",),
    "prepcli.operations.suggest_map": ("suggest_map",),
    "prepcli.operations.save_init": ("reshard", "save_init"),
    "prepcli.operations.save_params": ("save_params",),
    "prepcli.operations.tokenize": ("SampleCounts", "SamplePart", "TokenSample", "tokenize_shard"),
    "prepcli.operations.train": ("train",),
    "prepcli.operations.verify": ("verify",),
    "prepcli.operations.verify_logits": ("verify_logits",),
    "prepcli.errors": ("DamagedError", "OutputExistsError", "PrepError", "UsageError"),
    "prepcli.planning.plan": ("Plan",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that commands start without the modules of other commands."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("prepcli")
    from importlib import import_module

    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
