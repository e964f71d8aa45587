"""What has to be there before jax is: it reads its surroundings once."""

from __future__ import annotations

import os

QUICK = "--xla_backend_optimization_level=0"  # tests compile for longer than they compute; the demo runs as users do
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if QUICK not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{QUICK} {flags}".strip()  # what is said twice counts as it is said last
