"""prep: prepare language-model checkpoints for JAX and train from them.

Public functions print no text, return typed results and raise `PrepError`. Everything else is internal.

    import prepcli as prep

    padded = prep.pad_vocab("gpt-neo-1.3B", multiple=8)
    init = prep.save_init(padded.path, mesh="1,1,8")
    params = prep.load_params(init.path, mesh="1,1,8")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepcli.api.checks import inspect, verify
    from prepcli.api.compute import generate, load_params, train
    from prepcli.api.conversions import (
        export,
        pad_vocab,
        plan_export,
        plan_pad_vocab,
        plan_reshard,
        plan_save_init,
        reshard,
        save_init,
    )
    from prepcli.errors import DamagedError, OutputExistsError, PrepError, UsageError

    __version__: str

__all__ = [
    "DamagedError",
    "OutputExistsError",
    "PrepError",
    "UsageError",
    "__version__",
    "export",
    "generate",
    "inspect",
    "load_params",
    "pad_vocab",
    "plan_export",
    "plan_pad_vocab",
    "plan_reshard",
    "plan_save_init",
    "reshard",
    "save_init",
    "train",
    "verify",
]

_MODULES = {
    "prepcli.api.checks": ("inspect", "verify"),
    "prepcli.api.compute": ("generate", "load_params", "train"),
    "prepcli.errors": ("DamagedError", "OutputExistsError", "PrepError", "UsageError"),
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

    value = getattr(import_module(_MODULE_OF.get(name, "prepcli.api.conversions")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
