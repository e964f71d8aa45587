"""There so that pytest imports the package first, once for all of its processes, and what they compile is shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("prep", deadline=None)  # the time of an example depends on the load of the machine
settings.load_profile("prep")
