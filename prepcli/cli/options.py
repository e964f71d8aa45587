"""Options and arguments that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.console.progress import Mode


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return the aliases, and the folders here with a prep manifest, that start with `incomplete`."""
    from prepcli.formats.manifest import MANIFEST_FILE
    from prepcli.sources.aliases import ALIASES_BY_NAME

    folders = [path.parent.name for path in Path().glob(f"*/{MANIFEST_FILE}")]
    return [name for name in [*sorted(folders), *ALIASES_BY_NAME] if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Return the families of the aliases that start with `incomplete`."""
    from prepcli.sources.aliases import ALIAS_FAMILIES

    return [name for name in ALIAS_FAMILIES if name.startswith(incomplete)]


def complete_shipped_recipe(incomplete: str) -> list[str]:
    """Return the names of the shipped recipes that start with `incomplete`."""
    from prepcli.operations.recipe_files import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the TOML files here, and the shipped recipes, that start with `incomplete`."""
    files = sorted(path.name for path in Path().glob("*.toml"))
    return [
        *(name for name in files if name.startswith(incomplete)),
        *complete_shipped_recipe(incomplete),
    ]


def complete_recipe_or_checkpoint(incomplete: str) -> list[str]:
    """Return the recipes and the checkpoints that start with `incomplete`."""
    names = [*complete_recipe(incomplete), *complete_checkpoint(incomplete)]
    # A folder may have the name of a recipe. The shell would offer it twice.
    return [*dict.fromkeys(names)]


def complete_page(incomplete: str) -> list[str]:
    """Return the pages of the documentation that start with `incomplete`."""
    from prepcli.operations.docs import page_names

    return [name for name in page_names() if name.startswith(incomplete)]


def complete_devices(incomplete: str) -> list[str]:
    """Return the kinds of accelerators that start with `incomplete`, in any case."""
    from trainer.planning.accelerators import ACCELERATORS

    return [name for name in ACCELERATORS if name.lower().startswith(incomplete.lower())]


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias (see: prep models) or hub id.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
OptionalCheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias or hub id; default: the only prep folder here.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
FamilyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FAMILY",
        help="List only this family.",
        autocompletion=complete_family,
        show_default=False,
    ),
]

# All commands
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Print one line per leaf; -vv: one per slab.",
        show_default=False,
    ),
]

# Long-running commands
ProgressOption = Annotated[
    Mode,
    typer.Option(
        "--progress",
        metavar="MODE",
        envvar="PREP_PROGRESS",
        help="Show progress as auto, bar, lines, json or none.",
    ),
]

# Commands that read a checkpoint
RevisionOption = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="NAME",
        help="Read this branch, tag or commit of the hub.",
        show_default=False,
    ),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use only the hub's cache.")]
StreamOption = Annotated[
    bool, typer.Option("--stream", help="Read tensors from the hub without a local copy.")
]

# Commands that write a checkpoint
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="Write to FOLDER; default: NAME and a suffix.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the plan; write nothing.")]
MemoryOption = Annotated[
    str,
    typer.Option("--memory", metavar="SIZE", envvar="PREP_MEMORY", help="Limit memory to SIZE."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output of prep when done.")
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Discard the work of an unfinished run.")
]

ProcessesOption = Annotated[
    str | None,
    typer.Option(
        "--processes",
        metavar="N/I",
        envvar="PREP_PROCESSES",
        help="Write as process I (from 0) of N; default: from the variables of SLURM or JAX.",
        show_default=False,
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option("--workers", metavar="N", min=1, max=256, help="Use N processes on this host."),
]

NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify", help="Skip checking the checkpoint's checksums.")
]

DEFAULT_MEMORY = "512MiB"
DropOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drop",
        metavar="PATTERN",
        help="Ignore source tensors that match; repeatable.",
        show_default=False,
    ),
]
UntieOption = Annotated[
    bool, typer.Option("--untie", help="Keep an LM head that differs from the embedding.")
]
InitOption = Annotated[
    str, typer.Option("--init", metavar="KIND", help="Fill new rows with zeros, mean or normal.")
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="Set the seed of --init normal; default: 0.",
        show_default=False,
    ),
]
TrueVocabOption = Annotated[
    int | None,
    typer.Option(
        "--true-vocab",
        metavar="N",
        min=1,
        help="Set the unpadded size of the source's vocabulary.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype", metavar="NAME", help="Cast to float32, bfloat16 or float16.", show_default=False
    ),
]
AllowOverflowOption = Annotated[
    bool,
    typer.Option(
        "--allow-overflow", help="Round values too large for the dtype of the output to infinity."
    ),
]
CompressOption = Annotated[
    str | None,
    typer.Option(
        "--compress",
        metavar="zstd[:LEVEL]",
        help="Compress chunks; default: uncompressed.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="Read config.json from PATH, for a checkpoint without one.",
        show_default=False,
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh", metavar="DP,FSDP,MP", help="Lay out for this device mesh.", show_default=False
    ),
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="Change partition rules, as DIM=AXIS; repeatable.",
        show_default=False,
    ),
]
ScanOption = Annotated[
    bool | None,
    typer.Option(
        "--scan/--no-scan", help="Stack the layers or not; default: as the source, else stacked."
    ),
]
ScanAxisOption = Annotated[
    int | None,
    typer.Option(
        "--scan-axis",
        metavar="0|1",
        min=0,
        max=1,
        help="Stack the layers on this axis.",
        show_default=False,
    ),
]
EmaOption = Annotated[
    bool, typer.Option("--ema", help="Take the moving average of a run's parameters.")
]
StepOption = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="N|best|last",
        help="Read this step of a run, or the one with the lowest evaluation loss; default: the last.",
        show_default=False,
    ),
]
