"""`python -m prepcli`: the same as `prep`."""

from __future__ import annotations

import sys

from prepcli.cli.main import main

sys.exit(main())
