"""Set environment variables before jax is imported; jax reads them once. Commands started by tests inherit them.

Tests spend more time on compilation than on computation, so XLA compiles with few optimizations, and all processes
share one compilation cache, which later test sessions use too. Tests of the demo reset these variables. Tests start
hundreds of processes: Python writes bytecode even if PYTHONDONTWRITEBYTECODE is set, so that not every process compiles
the packages.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import version

from prepcli.core.compilation_cache import (
    FOLDER_VARIABLE,
    MIN_SECONDS_VARIABLE,
    compilation_cache_folder,
    delete_old_entries,
)

# Flags by version of jaxlib, because a flag that a version does not know ends the process.
FAST_COMPILE_FLAGS = {
    "0.10": (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ),
    "0.11": ("--xla_backend_optimization_level=0",),
    "0.12": ("--xla_backend_optimization_level=0",),
}
FLAGS = "XLA_FLAGS"
CACHE_DAYS = 14

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
user_flags = os.environ.get(FLAGS, "").split()
compile_flags = FAST_COMPILE_FLAGS.get(".".join(version("jaxlib").split(".")[:2]), ())
# XLA uses the last of several values of a flag, so the flags of the user come last.
flags = [*(flag for flag in compile_flags if flag not in user_flags), *user_flags]
os.environ[FLAGS] = " ".join(flags)
if FOLDER_VARIABLE not in os.environ:
    cache_folder = compilation_cache_folder("prep-tests")
    delete_old_entries(cache_folder.parent, CACHE_DAYS)
    os.environ |= {
        FOLDER_VARIABLE: str(cache_folder),
        MIN_SECONDS_VARIABLE: "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # of an entry that another process is still writing, which is compiled again; commands must not print it
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry:UserWarning"
    )
# A shell makes its background jobs ignore SIGINT, and commands would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
