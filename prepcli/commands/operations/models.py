"""List the aliases of checkpoints."""

from __future__ import annotations

from prepcli.core.errors import usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, Alias


def list_aliases(family: str | None = None) -> list[Alias]:
    """Return the aliases of one family, or of all families.

    Args:
        family: Family to list, or None for all families.

    Raises:
        UsageError: No alias has this family.
    """
    if family is not None and family not in ALIAS_FAMILIES:
        why = f"known: {', '.join(ALIAS_FAMILIES)}"
        hint = did_you_mean(family, ALIAS_FAMILIES)
        raise usage_error(f"no aliases of family `{family}`", why, hint)
    return [alias for alias in ALIASES if family in (None, alias.family)]
