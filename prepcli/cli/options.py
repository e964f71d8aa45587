"""The options that commands share, each spelled once. A command takes those that mean something for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.console.progress import Mode


def complete_checkpoint(incomplete: str) -> list[str]:
    """Aliases, and folders here that hold a prep manifest."""
    from prepcli.formats.manifest import MANIFEST_FILE
    from prepcli.sources.aliases import ALIASES_BY_NAME

    folders = [path.parent.name for path in Path().glob(f"*/{MANIFEST_FILE}")]
    return [name for name in [*sorted(folders), *ALIASES_BY_NAME] if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Families that have an alias."""
    from prepcli.sources.aliases import ALIAS_FAMILIES

    return [name for name in ALIAS_FAMILIES if name.startswith(incomplete)]


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A folder, an alias (see: prep models) or a hub id.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
OptionalCheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A folder, an alias or a hub id; left out: the one prep folder here.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
FamilyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FAMILY",
        help="Only this family.",
        autocompletion=complete_family,
        show_default=False,
    ),
]

# Every command
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Errors only.")]
VerboseOption = Annotated[
    int,
    typer.Option("-v", "--verbose", count=True, help="A line a leaf; -vv: a line a slab.", show_default=False),
]

# Commands that take long
ProgressOption = Annotated[
    Mode,
    typer.Option(
        "--progress", metavar="MODE", envvar="PREP_PROGRESS", help="auto (bar or lines), bar, lines, json or none."
    ),
]

# Commands that read a checkpoint
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.", show_default=False),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use the hub's cache only.")]
StreamOption = Annotated[bool, typer.Option("--stream", help="Read tensors from the hub; keep no copy of them.")]

# Commands that write one
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Where to write; default: NAME and the kind.", show_default=False),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")]
MemoryOption = Annotated[
    str,
    typer.Option("--memory", metavar="SIZE", envvar="PREP_MEMORY", help="The most memory to use."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace another output of prep, at the end.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Drop what an unfinished run has done.")]

ProcessesOption = Annotated[
    str | None,
    typer.Option(
        "--processes",
        metavar="N/I",
        envvar="PREP_PROCESSES",
        help="Be process I, from 0, of N that write this output; default: as SLURM's or JAX's variables say.",
        show_default=False,
    ),
]
WorkersOption = Annotated[int, typer.Option("--workers", metavar="N", min=1, max=256, help="Processes to use here.")]

NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify", help="Do not check the checkpoint's bytes against its checksums.")
]

DEFAULT_MEMORY = "512MiB"
DropOption = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="PATTERN", help="Tensors that may be lost; may be repeated.", show_default=False),
]
UntieOption = Annotated[bool, typer.Option("--untie", help="Keep a head that differs from its embedding.")]
InitOption = Annotated[str, typer.Option("--init", metavar="KIND", help="New rows: zeros, mean or normal.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="For --init normal; default: 0.", show_default=False),
]
TrueVocabOption = Annotated[
    int | None,
    typer.Option(
        "--true-vocab", metavar="N", min=1, help="True size of a vocabulary that came padded.", show_default=False
    ),
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", metavar="NAME", help="Cast to float32, bfloat16 or float16.", show_default=False),
]
AllowOverflowOption = Annotated[
    bool, typer.Option("--allow-overflow", help="Values too large for --dtype become infinite.")
]
CompressOption = Annotated[
    str | None,
    typer.Option(
        "--compress", metavar="zstd[:LEVEL]", help="Compress chunks, as Orbax does; default: raw.", show_default=False
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="PATH",
        help="config.json of a checkpoint without one, or its folder.",
        show_default=False,
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", metavar="DP,FSDP,MP", help="Lay out for this mesh of devices.", show_default=False),
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="DIM=AXIS", help="How a dim is split; may be repeated.", show_default=False),
]
ScanOption = Annotated[
    bool | None,
    typer.Option("--scan/--no-scan", help="Stack the layers, or a leaf for each; default: as it was, else stacked."),
]
ScanAxisOption = Annotated[
    int | None,
    typer.Option("--scan-axis", metavar="0|1", min=0, max=1, help="The axis of the layers.", show_default=False),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=0, help="The step of a run; default: its last one.", show_default=False),
]
