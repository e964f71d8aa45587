"""The environment, pages of the documentation and launched jobs as text and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepcli.commands.console.ui import Report, Ui
from prepcli.core.formatting import format_bytes
from prepcli.core.json_values import json_fields
from prepcli.core.tables import Block, Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prepcli.commands.operations.about import DocsPage, Environment
    from prepcli.commands.operations.launch import LaunchedScript, LocalJob


def environment_report(environment: Environment) -> Report:
    """Return a table for each topic."""
    versions = dict(environment.system)
    for name, version in environment.versions.items():
        versions[name] = version or "not installed"
    devices = environment.devices
    if devices is None:
        devices = {"not listed": "`prep env --devices` imports jax"}
    processes: dict[str, str] = {}
    for name, value in environment.processes.items():
        processes[name] = "-" if value is None else str(value)
    memory: dict[str, str] = {}
    for name, size in environment.memory.items():
        memory[name] = "none" if size is None else format_bytes(size)
    settings = [(setting.name, setting.value, setting.source) for setting in environment.settings]
    topics = {
        "versions": versions,
        "devices": devices,
        "processes": processes,
        "memory": memory,
    }
    blocks: list[Block] = []
    for title, values in topics.items():
        blocks += [Table([title, ""], [*values.items()], wrapped=[""]), ""]
    blocks.append(Table(["settings", "", "set by"], settings, wrapped=[""]))
    fields = {
        **environment.system,
        **json_fields(environment, "versions", "devices", "processes"),
        "memory": {name.replace(" ", "_"): size for name, size in environment.memory.items()},
        "settings": environment.settings,
    }
    return Report(blocks, fields)


# --- Pages of the documentation


def page_report(path: Path, ui: Ui, *, path_only: bool) -> Report:
    """Return the text of a page."""
    text = path.read_text("utf-8")
    fields = {"name": path.stem, "path": str(path), "text": text}
    if path_only:
        return Report(str(path), fields)
    ui.note(str(path))
    return Report(text.rstrip("\n"), fields)


def pages_report(pages: Sequence[DocsPage], folder: Path, *, path_only: bool) -> Report:
    """Return the table of the pages."""
    rows: list[tuple[str, str, str]] = []
    entries: list[dict[str, str]] = []
    for page in pages:
        name = page.path.stem
        rows.append((name, page.section, page.title))
        entries.append({"name": name, "path": str(page.path), "title": page.title})
    fields = {"path": str(folder), "pages": entries}
    if path_only:
        return Report(str(folder), fields)
    return Report([Table(("page", "section", "title"), rows, wrapped=("title",))], fields)


# --- Launched jobs


def script_report(launched: LaunchedScript) -> Report:
    """Return the report of a script: the reply to its submission, its file, or its text."""
    fields = {**json_fields(launched, "target", "script"), "output": launched.out}
    if launched.reply is not None:
        return Report(launched.reply, fields)
    if launched.out is not None:
        from prepcli.commands.operations.launch import submit_line

        next_command = submit_line(launched.target, launched.out)
        return Report(str(launched.out), fields, next_command)
    return Report(launched.script.rstrip("\n"), fields, is_script=True)


def local_report(job: LocalJob) -> Report:
    """Return the report of a job on this machine."""
    fields = {"target": "local", **json_fields(job, "processes", "devices")}
    return Report(job.result.rstrip("\n"), fields)
