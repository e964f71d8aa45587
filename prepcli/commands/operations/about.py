"""What prep ships and finds: aliases of checkpoints, pages of the documentation, and the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core import package_versions
from prepcli.core.errors import Command, PrepError, UsageError, text, usage_error
from prepcli.core.formatting import did_you_mean, did_you_mean_start
from prepcli.core.process_address import ProcessSettings, process_address, single_process_reason
from prepcli.engine.budget import cgroup_memory_limit, system_memory
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, Alias

SUFFIX = ".md"
# Variables of each setting, in order of precedence. The token may also be in a file.
SETTING_VARIABLES = {
    "HF_HOME": ("HF_HOME", "XDG_CACHE_HOME"),
    "HF_HUB_CACHE": ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"),
    "HF_TOKEN": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "HF_HUB_OFFLINE": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
}
HIDDEN_VALUE = "(set, not shown)"


def list_aliases(family: str | None = None) -> list[Alias]:
    """Return the aliases of one family, or of all families.

    Raises:
        UsageError: No alias has this family.
    """
    if family is not None and family not in ALIAS_FAMILIES:
        why = f"known: {', '.join(ALIAS_FAMILIES)}"
        hint = did_you_mean(family, ALIAS_FAMILIES)
        raise usage_error(f"no aliases of family `{family}`", why, hint)
    return [alias for alias in ALIASES if family in (None, alias.family)]


# --- Pages of the documentation


PACKAGE = Path(__file__).parents[2]
# Pages of earlier versions, which released messages and recipes name, and the pages that have their content.
MOVED_PAGES = {
    "reshard": "convert",
    "several-processes": "convert",
    "pad": "vocabulary",
    "maxtext-tunix": "other-trainers",
    "levanter-torchtitan": "other-trainers",
    "compare": "prove",
    "tokenize": "data",
    "sequences": "data",
    "gpu-machine": "launch",
    "slurm": "launch",
    "tpu-pod": "launch",
    "gke": "launch",
    "sky": "launch",
    "ray": "launch",
    "serve": "generate",
    "migrate-from-gpt-neo-example": "coming-from",
    "migrate-from-llamabpt": "coming-from",
    "migrate-from-easylm": "coming-from",
    "migrate-from-redco": "coming-from",
    "migrate-from-flaxlm": "coming-from",
    "launchers": "engines",
    "coverage": "exactness",
    "estimates": "memory",
    "saving": "resume",
    "loading": "many-hosts",
}


@dataclass(frozen=True, slots=True)
class DocsPage:
    """A page of the documentation.

    Attributes:
        path: Its file. The name of the page is that of the file, without `.md`.
        section: Its folder. Empty for a page outside of sections.
        title: Its heading.
    """

    path: Path
    section: str
    title: str


def list_pages() -> list[DocsPage]:
    """Return the pages: those outside of sections first, then section by section."""
    return [
        DocsPage(path, _page_section(path), _page_title(path)) for path in _page_paths().values()
    ]


def page_names() -> list[str]:
    """Return the names of the pages, in the order of the list."""
    return [*_page_paths()]


def docs_folder() -> Path:
    """Return the folder of the pages: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_docs"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def find_page(name: str) -> Path:
    """Return the path of a page by its name, such as `train`, `how-to/train` or `docs/how-to/train.md`.

    The name of a page of an earlier version stands for the page that has its content.
    """
    pages = _page_paths()
    *folders, stem = name.removesuffix(SUFFIX).split("/")
    stem = MOVED_PAGES.get(stem, stem)
    path = pages.get(stem)
    section = "/".join(folders).removeprefix("docs").strip("/")
    if path is None or section not in ("", _page_section(path)):
        # The name of a page of another section needs no other suggestions.
        candidates = [stem] if path else pages
        hint = did_you_mean_start(stem, candidates) or text("{} lists the pages", Command("docs"))
        raise usage_error(f"unknown page `{name}`", f"there are {len(pages)} pages", hint)
    return path


def _page_paths() -> dict[str, Path]:
    """Return the pages by the names of their files: pages outside of sections first, then section by section."""
    folder = docs_folder()
    paths = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: (path.parent != folder, path))
    return {path.stem: path for path in paths}


def _page_section(path: Path) -> str:
    """Return the folder of a page. It is empty for a page outside of sections."""
    return "" if path.parent == docs_folder() else path.parent.name


def _page_title(path: Path) -> str:
    """Return the heading of a page."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()


# --- The environment


@dataclass(frozen=True, slots=True)
class EnvSetting:
    """A setting from the environment. Its fields are JSON keys."""

    name: str
    value: str
    source: str  # variable or file that sets it, or `default`


@dataclass(frozen=True, slots=True)
class Environment:
    """What determines how prep runs on this machine.

    Attributes:
        system: Version of Python, and the platform.
        versions: Version of each package. None if it is not installed.
        devices: Kind of each local device by its name. None if the devices were not listed.
        processes: The job of several processes that the environment describes.
        memory: Sizes in bytes. None for no limit.
        settings: Settings with the variable or file of each.
    """

    system: Mapping[str, str]
    versions: Mapping[str, str | None]
    devices: Mapping[str, str] | None
    processes: Mapping[str, str | int | None]
    memory: Mapping[str, int | None]
    settings: tuple[EnvSetting, ...]


def read_environment(default_memory: str, *, list_devices: bool) -> Environment:
    """Return versions, processes, memory, settings and, on request, devices."""
    return Environment(
        system={"python": platform.python_version(), "platform": platform.platform()},
        versions=package_versions(),
        devices=_device_fields() if list_devices else None,
        processes=_process_fields(os.environ),
        memory={**system_memory(), "cgroup limit": cgroup_memory_limit()},
        settings=(*_prep_settings(os.environ, default_memory), *_hub_settings(os.environ)),
    )


def _device_fields() -> dict[str, str]:
    """Return the kind of each local device by its name, or the reason why there are none."""
    try:
        from trainer.distributed.devices import local_devices

        return {str(device): device.device_kind for device in local_devices()}
    except ImportError as error:
        return {"none": f"jax: {error}"}
    except PrepError as error:
        return {"none": f"jax: {error.why}"}


def _process_fields(environ: Mapping[str, str]) -> dict[str, str | int | None]:
    """Return the job of several processes that environment variables describe to `prep train`, and why."""
    fields: dict[str, str | int | None] = {
        "launcher": None,
        "count": 1,
        "index": 0,
        "address": None,
        "devices": None,
    }
    try:
        address = process_address(ProcessSettings(), environ)
    except UsageError as error:
        return fields | {"count": None, "index": None, "reason": f"invalid: {error}"}
    if address is None:
        return fields | {"reason": single_process_reason(environ)}
    ids = address.local_device_ids
    return {
        "launcher": address.launcher,
        "count": address.count,
        "index": address.index,
        "address": address.coordinator,
        "devices": "all" if ids is None else ",".join(map(str, ids)),
        "reason": address.reason,
    }


def _prep_settings(environ: Mapping[str, str], default_memory: str) -> list[EnvSetting]:
    defaults = {
        "PREP_MEMORY": default_memory,
        "PREP_PROGRESS": "auto",
        "PREP_TIMEOUT": "10",
        "PREP_TRACEBACK": "-",
    }
    defaults["NO_COLOR"] = "-"
    return [
        _setting(environ, name, environ.get(name) or default) for name, default in defaults.items()
    ]


def _hub_settings(environ: Mapping[str, str]) -> list[EnvSetting]:
    """Return the settings as huggingface_hub parsed them. The token's value is hidden."""
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
        token = (
            EnvSetting("HF_TOKEN", HIDDEN_VALUE, constants.HF_TOKEN_PATH)
            if is_stored
            else replace(token, value="-")
        )
    return [*settings, token]


def _setting(environ: Mapping[str, str], name: str, value: str) -> EnvSetting:
    source = next(
        (variable for variable in SETTING_VARIABLES.get(name, (name,)) if environ.get(variable)),
        "default",
    )
    return EnvSetting(name, value, source)
