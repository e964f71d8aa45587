"""`prep env`: what prep runs with - versions, devices, memory, variables and caches, and where each comes from."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from prepcli.commands.machine import cgroup_memory_limit, system_memory
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, format_table

PACKAGES = (
    "prepcli", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "ml_dtypes",
    "huggingface_hub", "tokenizers", "typer", "rich", "transformers", "torch",
)  # fmt: skip


# Which variables decide about a setting, the first that is set; the token may also lie in a file
SETTING_VARIABLES = {
    "HF_HOME": ("HF_HOME", "XDG_CACHE_HOME"),
    "HF_HUB_CACHE": ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"),
    "HF_TOKEN": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "HF_HUB_OFFLINE": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
}
HIDDEN_VALUE = "(set, not shown)"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that comes from outside; `source` is the variable or file that decided, or `default`."""

    name: str
    value: str
    source: str


def env(default_memory: str, list_devices: bool) -> Report:
    """Everything at once; devices only on request, since that imports jax and takes hold of them."""
    system = {"python": platform.python_version(), "platform": platform.platform()}
    versions = {name: _version(name) for name in PACKAGES}
    sizes = {**system_memory(), "cgroup limit": cgroup_memory_limit()}
    settings = [*_prep_settings(os.environ, default_memory), *_hub_settings(os.environ)]
    devices = _devices() if list_devices else None
    fields = {
        **system,
        "versions": versions,
        "devices": devices,
        "memory": {name.replace(" ", "_"): size for name, size in sizes.items()},
        "settings": [asdict(setting) for setting in settings],
    }
    shown_devices = devices if devices is not None else {"not looked for": "`prep env --devices` imports jax"}
    tables = [
        _two_column_table("versions", {**system, **{name: version or "not installed" for name, version in versions.items()}}),
        _two_column_table("devices", shown_devices),
        _two_column_table("memory", {name: "none" if size is None else format_bytes(size) for name, size in sizes.items()}),
        format_table([(each.name, each.value, each.source) for each in settings], ["settings", "", "decided by"]),
    ]
    return Report(text="\n\n".join(tables), fields=fields)


def _two_column_table(title: str, rows: Mapping[str, str]) -> str:
    return format_table(list(rows.items()), [title, ""])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    """Each device of this process by its name, or why there are none."""
    try:
        import jax

        return {str(device): device.device_kind for device in jax.local_devices()}
    except (ImportError, RuntimeError) as error:  # RuntimeError: JAX_PLATFORMS asks for what is not there
        return {"none": f"jax says: {error}"}


def _prep_settings(environ: Mapping[str, str], default_memory: str) -> list[Setting]:
    defaults = {"PREP_MEMORY": default_memory, "PREP_PROGRESS": "auto", "PREP_TIMEOUT": "10", "PREP_TRACEBACK": "-"}
    defaults["NO_COLOR"] = "-"
    return [_setting(environ, name, environ.get(name) or default) for name, default in defaults.items()]


def _hub_settings(environ: Mapping[str, str]) -> list[Setting]:
    """The hub library's settings as it understood them; a token is never shown."""
    from huggingface_hub import constants

    values = {
        "HF_HOME": constants.HF_HOME,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_OFFLINE": "1" if constants.HF_HUB_OFFLINE else "0",
    }
    settings = [_setting(environ, name, value) for name, value in values.items()]
    token = _setting(environ, "HF_TOKEN", HIDDEN_VALUE)
    if token.source == "default":
        is_stored = Path(constants.HF_TOKEN_PATH).is_file()
        token = Setting("HF_TOKEN", HIDDEN_VALUE, constants.HF_TOKEN_PATH) if is_stored else replace(token, value="-")
    return [*settings, token]


def _setting(environ: Mapping[str, str], name: str, value: str) -> Setting:
    source = next((each for each in SETTING_VARIABLES.get(name, (name,)) if environ.get(each)), "default")
    return Setting(name, value, source)
