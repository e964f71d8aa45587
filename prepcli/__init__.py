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
    from prepcli.commands.operations.chain import verify_chain
    from prepcli.commands.operations.compute_options import (
        DataOptions,
        EvaluateOptions,
        GenerateOptions,
        TrainOptions,
    )
    from prepcli.commands.operations.data import (
        BatchDigest,
        Batches,
        SampleCounts,
        SamplePart,
        TokenSample,
        batches,
        tokenize_shard,
    )
    from prepcli.commands.operations.evaluate import evaluate
    from prepcli.commands.operations.export import export, merge
    from prepcli.commands.operations.generate import generate
    from prepcli.commands.operations.harness_model import harness_model
    from prepcli.commands.operations.inspect import inspect
    from prepcli.commands.operations.inspection_options import (
        ChainOptions,
        InspectOptions,
        LockOptions,
        LogitsOptions,
        PlanOptions,
        RoundtripOptions,
        SuggestMapOptions,
        VerifyOptions,
    )
    from prepcli.commands.operations.lock import lock
    from prepcli.commands.operations.options import (
        AddTokensOptions,
        ConversionOptions,
        DropOptions,
        ExportMapOptions,
        ExportOptions,
        LayoutOptions,
        MapOptions,
        MergeOptions,
        ModuleOptions,
        NewRowOptions,
        PadVocabOptions,
        RemoveTokensOptions,
        RerunOptions,
        ReshardOptions,
        SaveInitOptions,
        SourceOptions,
        StrictOptions,
        TowersOptions,
        TrainingStateOptions,
        VerbatimOptions,
    )
    from prepcli.commands.operations.pad_vocab import pad_vocab
    from prepcli.commands.operations.params import (
        from_hf_flax,
        linen_model,
        load_params,
        nnx_model,
        save_params,
        to_hf_flax,
    )
    from prepcli.commands.operations.plan import plan
    from prepcli.commands.operations.report import report
    from prepcli.commands.operations.results import (
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
    from prepcli.commands.operations.roundtrip import roundtrip
    from prepcli.commands.operations.save_init import reshard, save_init
    from prepcli.commands.operations.suggest_map import suggest_map
    from prepcli.commands.operations.tokens import add_tokens, remove_tokens
    from prepcli.commands.operations.train import train
    from prepcli.commands.operations.verification_results import (
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
    from prepcli.commands.operations.verify import verify
    from prepcli.commands.operations.verify_logits import verify_logits
    from prepcli.commands.testing.checks import CheckResult, check_family
    from prepcli.commands.testing.tiny_config import scale_down
    from prepcli.core.errors import DamagedError, OutputExistsError, PrepError, UsageError
    from prepcli.core.observer import Observer, Progress
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
    "CheckResult",
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
    "check_family",
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
    "scale_down",
    "suggest_map",
    "to_hf_flax",
    "tokenize_shard",
    "train",
    "verify",
    "verify_chain",
    "verify_logits",
]

_MODULES = {
    "prepcli.commands.operations.tokens": (
        "add_tokens",
        "remove_tokens",
    ),
    "prepcli.commands.operations.data": (
        "BatchDigest",
        "Batches",
        "SampleCounts",
        "SamplePart",
        "TokenSample",
        "batches",
        "tokenize_shard",
    ),
    "prepcli.commands.operations.compute_options": (
        "DataOptions",
        "EvaluateOptions",
        "GenerateOptions",
        "TrainOptions",
    ),
    "prepcli.commands.operations.options": (
        "AddTokensOptions",
        "ConversionOptions",
        "DropOptions",
        "ExportMapOptions",
        "ExportOptions",
        "LayoutOptions",
        "MapOptions",
        "MergeOptions",
        "ModuleOptions",
        "NewRowOptions",
        "PadVocabOptions",
        "RemoveTokensOptions",
        "RerunOptions",
        "ReshardOptions",
        "SaveInitOptions",
        "SourceOptions",
        "StrictOptions",
        "TowersOptions",
        "TrainingStateOptions",
        "VerbatimOptions",
    ),
    "prepcli.commands.operations.inspect": ("inspect",),
    "prepcli.commands.operations.inspection_options": (
        "ChainOptions",
        "InspectOptions",
        "LockOptions",
        "LogitsOptions",
        "PlanOptions",
        "RoundtripOptions",
        "SuggestMapOptions",
        "VerifyOptions",
    ),
    "prepcli.commands.operations.plan": ("plan",),
    "prepcli.commands.operations.report": ("report",),
    "prepcli.commands.operations.results": (
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
    "prepcli.commands.operations.verification_results": (
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
    "prepcli.core.observer": ("Observer", "Progress"),
    "prepcli.commands.operations.chain": ("verify_chain",),
    "prepcli.commands.operations.evaluate": ("evaluate",),
    "prepcli.commands.operations.export": ("export", "merge"),
    "prepcli.commands.operations.params": (
        "from_hf_flax",
        "linen_model",
        "load_params",
        "nnx_model",
        "save_params",
        "to_hf_flax",
    ),
    "prepcli.commands.operations.generate": ("generate",),
    "prepcli.commands.operations.harness_model": ("harness_model",),
    "prepcli.commands.operations.lock": ("lock",),
    "prepcli.commands.operations.pad_vocab": ("pad_vocab",),
    "prepcli.commands.operations.roundtrip": ("roundtrip",),
    "prepcli.commands.operations.suggest_map": ("suggest_map",),
    "prepcli.commands.operations.save_init": (
        "reshard",
        "save_init",
    ),
    "prepcli.commands.operations.train": ("train",),
    "prepcli.commands.operations.verify": ("verify",),
    "prepcli.commands.operations.verify_logits": ("verify_logits",),
    "prepcli.commands.testing.checks": (
        "CheckResult",
        "check_family",
    ),
    "prepcli.commands.testing.tiny_config": ("scale_down",),
    "prepcli.core.errors": (
        "DamagedError",
        "OutputExistsError",
        "PrepError",
        "UsageError",
    ),
    "prepcli.planning.plan": ("Plan",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that commands start without the modules of other commands."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from prepcli.core import version

        return version()
    from importlib import import_module

    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
