"""Names of tensors that a path, a terminal or an index may misread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# Names of one model, by what is hostile about them.
HOSTILE_NAMES: dict[str, tuple[str, ...]] = {
    "parent": ("x/../../escaped",),
    "other checkpoint": ("x/../../mine/params.w",),
    "parent first": ("../escaped",),
    "only parent": ("..",),
    "only dot": (".",),
    "dots": ("...",),
    "absolute": ("/tmp/escaped",),
    "two slashes first": ("//tmp/escaped",),
    "dot inside": ("a/./b",),
    "parent inside": ("a/../b",),
    "slash": ("a/b",),
    "slash last": ("a/",),
    "only slash": ("/",),
    "two slashes": ("a//b",),
    "below another": ("x", "x/y"),
    "below a chunk": ("x", "x/0.0"),
    "below a chunk of zarr 3": ("x", "x/c/0"),
    "below a document": ("x", "x/.zarray"),
    "below a document of zarr 3": ("x", "x/zarr.json"),
    "NUL": ("a\0b",),
    "only NUL": ("\0",),
    "newline": ("a\nb",),
    "carriage return": ("a\rb",),
    "escape sequence": ("\x1b[2Jx",),
    "C1 control": ("a\x9b2Jx",),
    "direction": ("a\u202eb",),
    "line separator": ("a\u2028b",),
    "longest name": ("m" * 248,),
    "one byte more": ("m" * 249,),
    "long in UTF-8": ("\u00e9" * 130,),
    "huge": ("m" * 60_000,),
    "empty": ("",),
    "blank": (" ",),
    "stacked": ("layers.*.w", "layers.0.w", "layers.1.w"),
    "metadata": ("_METADATA",),
    "marker": ("../commit_success.txt",),
    "manifest": ("prep-manifest.json",),
    "work folder": (".prep",),
    "settings": ("hf/config.json",),
    "slot": ("towers/x", "opt_state.mu/x", "params/x"),
    "backslash": ("..\\..\\x",),
    "percent": ("a%2f..%2fb",),
    "query": ("a?b#c",),
    "home": ("~",),
    "option": ("--out",),
    "placeholder": ("{out}",),
    "both cases": ("X", "x"),
    "two spellings": ("\u00e9", "e\u0301"),
}


def write_hostile_model(folder: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Write a model of an unknown type with tensors of these names and `w`, and return its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    tensors: dict[str, np.ndarray] = {}
    for number, name in enumerate(dict.fromkeys([*names, "w"])):
        tensors[name] = np.arange(16, dtype=np.float32).reshape(4, 4) + 100 * number
    save_file(tensors, folder / "model.safetensors")
    return tensors
