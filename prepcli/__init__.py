"""prep: prepare language-model checkpoints for JAX and train from them.

Public functions print no text, return typed results and raise `PrepError`. The types of their options and results are
exported for annotations. Everything else is internal.

    import prepcli as prep

    padded = prep.pad_vocab("gpt-neo-1.3B", multiple=8)
    init = prep.save_init(padded.path, mesh="1,1,8")
    params = prep.load_params(init.path, mesh="1,1,8")
"""

from __future__ import annotations

# Most modules of the standard library are imported in functions: only after this module, Ctrl-C ends `prep` without a
# traceback.


def _public_modules() -> dict[str, str]:
    """Return the module of each public name, from the imports of `__init__.pyi`."""
    import ast
    from pathlib import Path

    modules: dict[str, str] = {}
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                modules[alias.name] = str(statement.module)
    return modules


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that commands start without the modules of other commands."""
    if name == "__version__":
        from prepcli.core import version

        return version()
    modules = _public_modules()
    if name == "__all__":
        return sorted([*modules, "__version__"])
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(modules[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_modules(), "__version__"})
