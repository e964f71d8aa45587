"""What has to be there before anything starts."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # jax reads it once, before its first computation
