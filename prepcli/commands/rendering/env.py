"""The environment of prep as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.env import Environment
from prepcli.core.formatting import format_bytes
from prepcli.core.tables import format_table


def environment_report(environment: Environment, columns: int | None) -> Report:
    """Return a table for each topic.

    Args:
        environment: Result of the operation.
        columns: Width of the terminal. None means unlimited.
    """
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
    tables = [
        _two_column_table("versions", versions, columns),
        _two_column_table("devices", devices, columns),
        _two_column_table("processes", processes, columns),
        _two_column_table("memory", memory, columns),
        format_table(settings, ["settings", "", "set by"], width=columns, wrapped=[""]),
    ]
    return Report("\n\n".join(tables), _environment_fields(environment))


def _environment_fields(environment: Environment) -> dict[str, object]:
    """Return the fields of the JSON object."""
    return {
        **environment.system,
        "versions": environment.versions,
        "devices": environment.devices,
        "processes": environment.processes,
        "memory": {name.replace(" ", "_"): size for name, size in environment.memory.items()},
        "settings": [asdict(setting) for setting in environment.settings],
    }


def _two_column_table(title: str, rows: Mapping[str, str], columns: int | None) -> str:
    return format_table(list(rows.items()), [title, ""], width=columns, wrapped=[""])
