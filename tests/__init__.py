"""What has to be there before jax is: it reads its surroundings once. Commands that tests run have it too."""

from __future__ import annotations

import os
import tempfile

QUICK = "--xla_backend_optimization_level=0"  # tests compile for longer than they compute; the demo runs as users do
CACHE = "JAX_COMPILATION_CACHE_DIR"

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if QUICK not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{QUICK} {flags}".strip()  # what is said twice counts as it is said last
if CACHE not in os.environ:
    made = tempfile.TemporaryDirectory(prefix="prep-tests-")  # which is removed when this process ends
    os.environ |= {CACHE: made.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
