"""What has to be there before jax is: it reads its surroundings once. Commands that tests run have it too.

Tests compile for much longer than they compute, so it is compiled quickly, and once for all processes; the demo, where
it is run by itself, compiles as users do.
"""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.metadata import version

QUICK = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")
FLAGS, CACHE = "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if version("jaxlib").startswith("0.10."):  # a flag that it does not know ends a process, and of others nothing is known
    own = os.environ.get(FLAGS, "").split()
    os.environ[FLAGS] = " ".join([*(flag for flag in QUICK if flag not in own), *own])  # what is said last counts
if CACHE not in os.environ:
    made = tempfile.TemporaryDirectory(prefix="prep-tests-")  # which is removed when this process ends
    os.environ |= {CACHE: made.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background: commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
