"""The commands as Typer takes them: parse, call, print.

To add a command, write what it does as a function from its request to a Report in `commands/NAME.py`, and below a
function named like the command that takes its options (the shared ones are in options.py), documents itself with two
or three examples after a `\\b` line, imports that function in its body, and returns the exit code:

    @app.command()
    def pad_vocab(checkpoint: Checkpoint, out: Out = None, memory: Memory = MEMORY_DEFAULT, …, json: Json = False,
                  quiet: Quiet = False, verbose: Verbose = 0, progress: ProgressMode = "auto") -> int:
        from prepcli.commands.pad_vocab import Request, pad_vocab
        ui = open_ui("pad-vocab", json, quiet, verbose, progress)
        with stoppable():                             # conversions only: SIGTERM and SIGUSR1 end in exit code 75
            return ui.finish(pad_vocab(Request(…, parse_bytes(memory)), ui))

Nothing is caught there: `cli.main` turns each exception into its message and exit code. Nothing that takes time to
import (numpy, jax, huggingface_hub, rich …) is imported at the top of this file or of a module that it imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.accounting import Wishes
from prepcli.app_train import train
from prepcli.errors import USAGE
from prepcli.options import (
    MEMORY_DEFAULT,
    Checkpoint,
    CheckpointHere,
    Drop,
    DryRun,
    Family,
    Json,
    Memory,
    MeshOption,
    Offline,
    Out,
    Overwrite,
    ProgressMode,
    Quiet,
    Restart,
    Revision,
    RuleOption,
    Scan,
    ScanAxis,
    Step,
    TrueVocab,
    Untie,
    Verbose,
)
from prepcli.signals import stoppable
from prepcli.ui import open_ui, version
from prepcli.units import parse_bytes

app = typer.Typer(
    name="prep",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prep {version()}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def prep(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Prepare language-model checkpoints for JAX: exactly, within a stated
    memory, and so that nothing is lost.

    CHECKPOINT is a folder, an alias (see: prep models) or a hub id.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


@app.command()
def pad_vocab(
    checkpoint: Checkpoint,
    multiple: Annotated[int, typer.Option("--multiple", metavar="N", min=1, help="Pad to a multiple of N.")] = 8,
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", min=1, help="Pad to N rows.", show_default=False)
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="DP,FSDP,MP", help="Pad to what this mesh divides.", show_default=False),
    ] = None,
    init: Annotated[str, typer.Option("--init", metavar="KIND", help="New rows: zeros, mean or normal.")] = "zeros",
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For --init normal.")] = 0,
    true_vocab: TrueVocab = None,
    drop: Drop = None,
    untie: Untie = False,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Pad the vocabulary, so that it can be sharded.

    \b
    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.conversion import Common
    from prepcli.commands.pad_vocab import Request
    from prepcli.commands.pad_vocab import pad_vocab as run

    ui = open_ui("pad-vocab", json, quiet, verbose, progress)
    common = Common(checkpoint, out, parse_bytes(memory), dry_run, overwrite, restart, offline, revision)
    wishes = Wishes(tuple(drop or ()), untie)
    with stoppable():
        return ui.finish(run(Request(common, multiple, size, mesh, init, seed, true_vocab, wishes), ui))


@app.command()
def save_init(
    checkpoint: Checkpoint,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    pad_vocab: Annotated[
        str, typer.Option("--pad-vocab", metavar="no|auto|N", help="Pad to a multiple of N; auto: as the mesh needs.")
    ] = "no",
    init: Annotated[str, typer.Option("--init", metavar="KIND", help="New rows: zeros, mean or normal.")] = "zeros",
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For --init normal.")] = 0,
    true_vocab: TrueVocab = None,
    drop: Drop = None,
    untie: Untie = False,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Convert a Hugging Face checkpoint into a sharded Orbax one.

    \b
    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.conversion import Common
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import save_init as run

    ui = open_ui("save-init", json, quiet, verbose, progress)
    common = Common(checkpoint, out, parse_bytes(memory), dry_run, overwrite, restart, offline, revision)
    wishes = Wishes(tuple(drop or ()), untie)
    rules = tuple(rule or ())
    with stoppable():
        request = Request(common, mesh, rules, scan, scan_axis, pad_vocab, init, seed, true_vocab, wishes)
        return ui.finish(run(request, ui))


@app.command()
def reshard(
    checkpoint: CheckpointHere = None,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    params_only: Annotated[bool, typer.Option("--params-only", help="Leave a run's optimizer state out.")] = False,
    step: Step = None,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Lay an Orbax checkpoint out for another mesh.

    \b
    Examples:
      prep reshard --mesh 1,64,4
      prep reshard llama-13b-init --mesh fsdp:64,mp:4,sp:2 --out wide
      prep reshard llama-13b-init --mesh 1,1,8 --no-scan
      prep reshard runs/llama-13b --step 2000 --params-only
    """
    from prepcli.commands.conversion import Common
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import reshard as run

    ui = open_ui("reshard", json, quiet, verbose, progress)
    common = Common(checkpoint, out, parse_bytes(memory), dry_run, overwrite, restart, step=step)
    with stoppable():
        request = Request(common, mesh, tuple(rule or ()), scan, scan_axis, params_only=params_only)
        return ui.finish(run(request, ui))


@app.command()
def export(
    checkpoint: CheckpointHere = None,
    keep_padding: Annotated[bool, typer.Option("--keep-padding", help="Leave the padded rows on.")] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="The most a file holds.")] = "5GB",
    true_vocab: TrueVocab = None,
    step: Step = None,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Convert an Orbax checkpoint into a Hugging Face folder.

    \b
    Examples:
      prep export llama-13b-init
      prep export --keep-padding --shard-size 2GB --out padded-hf
      prep export runs/llama-13b --step 2000
    """
    from prepcli.commands.conversion import Common
    from prepcli.commands.export import Request
    from prepcli.commands.export import export as run

    ui = open_ui("export", json, quiet, verbose, progress)
    common = Common(checkpoint, out, parse_bytes(memory), dry_run, overwrite, restart, step=step)
    with stoppable():
        return ui.finish(run(Request(common, keep_padding, parse_bytes(shard_size), true_vocab), ui))


@app.command()
def verify(
    checkpoint: CheckpointHere = None,
    against: Annotated[
        str | None, typer.Argument(metavar="AGAINST", help="Another checkpoint.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Headers, names and sizes only.")] = False,
    memory: Memory = MEMORY_DEFAULT,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Check every bit, against the manifest or another checkpoint.

    \b
    Examples:
      prep verify gpt-neo-1.3B-padded-init
      prep verify gpt-neo-1.3B-padded gpt-neo-1.3B
    """
    from prepcli.commands.conversion import Common
    from prepcli.commands.verify import Request
    from prepcli.commands.verify import verify as run

    ui = open_ui("verify", json, quiet, verbose, progress)
    common = Common(checkpoint, None, parse_bytes(memory), offline=offline, revision=revision)
    with stoppable():
        return ui.finish(run(Request(common, against, quick), ui))


@app.command()
def inspect(
    checkpoint: Checkpoint,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", help="Tensors whose name matches, as `*.q.*`.", show_default=False),
    ] = None,
    sort: Annotated[
        Literal["name", "size", "file"],
        typer.Option("--sort", metavar="BY", help="name, size, or file: as they are stored."),
    ] = "file",
    tree: Annotated[bool, typer.Option("--tree", help="As a tree, equal layers once.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Least, greatest, mean, nan …; reads the data.")] = False,
    shards: Annotated[
        str | None,
        typer.Option("--shards", metavar="LEAF", help="Draw which device holds what of a leaf.", show_default=False),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", metavar="DP,FSDP,MP", help="For --shards; default: the checkpoint's.", show_default=False
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="OTHER", help="Names, shapes and dtypes that differ.", show_default=False),
    ] = None,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Show what a checkpoint holds.

    \b
    Examples:
      prep inspect gpt-neo-1.3B-init --tree
      prep inspect ./llama-13b '*.q_proj.*' --stats
      prep inspect gpt-neo-1.3B-init --shards embed.tokens --mesh 1,2,4
    """
    from prepcli.commands.inspect import Request
    from prepcli.commands.inspect import inspect as run

    ui = open_ui("inspect", json, quiet, verbose, progress)
    return ui.finish(run(Request(checkpoint, pattern, sort, tree, stats, shards, mesh, diff, offline, revision), ui))


app.command()(train)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to work.")] = Path("prep-demo"),
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> int:
    """Take a tiny model all the way and back, offline, and check it.

    It runs the commands that you would type, shows them, kills one midway
    and goes on, and keeps what they made.

    \b
    Examples:
      prep demo
      prep demo --out /tmp/demo --json
    """
    from prepcli.commands.demo import demo as run

    with stoppable():
        ui = open_ui("demo", json, quiet, verbose)
        return ui.finish(run(out, ui))


@app.command()
def models(family: Family = None, json: Json = False, quiet: Quiet = False, verbose: Verbose = 0) -> int:
    """List the checkpoints that have a short name.

    \b
    Examples:
      prep models
      prep models llama --json
    """
    from prepcli.commands.models import models as run

    return open_ui("models", json, quiet, verbose).finish(run(family))


@app.command()
def env(
    devices: Annotated[bool, typer.Option("--devices", help="Import jax and list its devices.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> int:
    """Show versions, devices, memory, settings and caches.

    \b
    Examples:
      prep env
      prep env --devices --json
    """
    from prepcli.commands.env import env as run

    return open_ui("env", json, quiet, verbose).finish(run(MEMORY_DEFAULT, devices))
