"""The commands that write a checkpoint, as Typer takes them."""

from __future__ import annotations

from typing import Annotated

import typer

from prepcli.app.options import (
    MEMORY_DEFAULT,
    AllowOverflow,
    Checkpoint,
    CheckpointHere,
    Compress,
    ConfigOption,
    Drop,
    DryRun,
    Dtype,
    Json,
    Memory,
    MeshOption,
    NewRows,
    NewRowsSeed,
    Offline,
    Out,
    Overwrite,
    Processes,
    ProgressMode,
    Quiet,
    Restart,
    Revision,
    RuleOption,
    Scan,
    ScanAxis,
    Step,
    Stream,
    TrueVocab,
    Untie,
    Verbose,
    WorkerCount,
)
from prepcli.planning.accounting import Wishes
from prepcli.signals import stoppable
from prepcli.ui import open_ui
from prepcli.units import parse_bytes


def pad_vocab(
    context: typer.Context,
    checkpoint: Checkpoint,
    multiple: Annotated[int, typer.Option("--multiple", metavar="N", min=1, help="Pad to a multiple of N.")] = 8,
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", min=1, help="Pad to N rows.", show_default=False)
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="DP,FSDP,MP", help="Pad to what this mesh divides.", show_default=False),
    ] = None,
    init: NewRows = "zeros",
    seed: NewRowsSeed = 0,
    true_vocab: TrueVocab = None,
    config: ConfigOption = None,
    drop: Drop = None,
    untie: Untie = False,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    processes: Processes = None,
    workers: WorkerCount = 1,
    revision: Revision = None,
    offline: Offline = False,
    stream: Stream = False,
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
    from prepcli.commands.conversion import Asked, Common
    from prepcli.commands.pad_vocab import Request
    from prepcli.commands.pad_vocab import pad_vocab as run

    ui = open_ui("pad-vocab", json, quiet, verbose, progress)
    asked = Asked(processes, workers, tuple(context.obj or ()))
    common = Common(
        checkpoint,
        out,
        parse_bytes(memory),
        dry_run,
        overwrite,
        restart,
        offline,
        revision,
        stream=stream,
        asked=asked,
        config=config,
    )
    wishes = Wishes(tuple(drop or ()), untie)
    with stoppable():
        return ui.finish(run(Request(common, multiple, size, mesh, init, seed, true_vocab, wishes), ui))


def save_init(
    context: typer.Context,
    checkpoint: Checkpoint,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    pad_vocab: Annotated[
        str, typer.Option("--pad-vocab", metavar="no|auto|N", help="Pad to a multiple of N; auto: as the mesh needs.")
    ] = "no",
    init: NewRows = "zeros",
    seed: NewRowsSeed = 0,
    true_vocab: TrueVocab = None,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    config: ConfigOption = None,
    drop: Drop = None,
    untie: Untie = False,
    compress: Compress = None,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    processes: Processes = None,
    workers: WorkerCount = 1,
    revision: Revision = None,
    offline: Offline = False,
    stream: Stream = False,
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
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.conversion import Asked, Common
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import save_init as run

    ui = open_ui("save-init", json, quiet, verbose, progress)
    asked = Asked(processes, workers, tuple(context.obj or ()))
    common = Common(
        checkpoint,
        out,
        parse_bytes(memory),
        dry_run,
        overwrite,
        restart,
        offline,
        revision,
        stream=stream,
        asked=asked,
        config=config,
        allow_overflow=allow_overflow,
    )
    wishes = Wishes(tuple(drop or ()), untie)
    rules = tuple(rule or ())
    with stoppable():
        request = Request(
            *(common, mesh, rules, scan, scan_axis, pad_vocab, init, seed, true_vocab, wishes),
            dtype=dtype,
            compress=compress,
        )
        return ui.finish(run(request, ui))


def reshard(
    context: typer.Context,
    checkpoint: CheckpointHere = None,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    params_only: Annotated[bool, typer.Option("--params-only", help="Leave a run's optimizer state out.")] = False,
    step: Step = None,
    config: ConfigOption = None,
    compress: Compress = None,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    processes: Processes = None,
    workers: WorkerCount = 1,
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
    from prepcli.commands.conversion import Asked, Common
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import reshard as run

    ui = open_ui("reshard", json, quiet, verbose, progress)
    asked = Asked(processes, workers, tuple(context.obj or ()))
    common = Common(
        checkpoint, out, parse_bytes(memory), dry_run, overwrite, restart, step=step, asked=asked, config=config
    )
    with stoppable():
        rules = tuple(rule or ())
        request = Request(common, mesh, rules, scan, scan_axis, params_only=params_only, compress=compress)
        return ui.finish(run(request, ui))


def export(
    context: typer.Context,
    checkpoint: CheckpointHere = None,
    keep_padding: Annotated[bool, typer.Option("--keep-padding", help="Leave the padded rows on.")] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="The most a file holds.")] = "5GB",
    layout: Annotated[str, typer.Option("--layout", metavar="TREE", help="hf, hf-flax or easylm.")] = "hf",
    container: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="safetensors, msgpack or stream; default: the layout's.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    true_vocab: TrueVocab = None,
    config: ConfigOption = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Then upload it to the hub.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")] = False,
    step: Step = None,
    out: Out = None,
    memory: Memory = MEMORY_DEFAULT,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    processes: Processes = None,
    workers: WorkerCount = 1,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
) -> int:
    """Convert an Orbax checkpoint into a Hugging Face folder, or one for Flax.

    \b
    Examples:
      prep export llama-13b-init
      prep export --keep-padding --shard-size 2GB --out padded-hf
      prep export runs/llama-13b --step 2000 --dtype bfloat16
      prep export llama-13b-init --layout easylm
      prep export llama-13b-init --push me/llama-13b --private
    """
    from prepcli.commands.conversion import Asked, Common
    from prepcli.commands.export import Request
    from prepcli.commands.push import export_and_push

    ui = open_ui("export", json, quiet, verbose, progress)
    asked = Asked(processes, workers, tuple(context.obj or ()))
    common = Common(
        checkpoint,
        out,
        parse_bytes(memory),
        dry_run,
        overwrite,
        restart,
        step=step,
        asked=asked,
        config=config,
        allow_overflow=allow_overflow,
    )
    with stoppable():
        request = Request(common, keep_padding, parse_bytes(shard_size), true_vocab, layout, container, dtype)
        return ui.finish(export_and_push(request, push, private, ui))
