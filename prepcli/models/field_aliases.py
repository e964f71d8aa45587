"""Configs whose fields have other names in published files. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepcli.core.json_values import HFConfig, JsonValue


class AliasedConfig(Mapping[str, JsonValue]):
    """A config in which some fields have two names. The alias overrides, as in `attribute_map` of transformers.

    >>> config = AliasedConfig({"num_layers": 2}, {"num_layers": "num_hidden_layers"})
    >>> config.get("num_hidden_layers")
    2
    """

    def __init__(self, config: HFConfig, aliases: Mapping[str, str]) -> None:
        """Wrap a config.

        Args:
            config: Content of a config.json.
            aliases: Alias -> name of the field that the family reads.
        """
        self.config = config
        self.aliases = aliases
        self._aliases = {name: alias for alias, name in aliases.items()}

    def stored_name(self, name: str) -> str:
        """Return the alias of a field, which overrides it, or the field's name if it has none."""
        return self._aliases.get(name, name)

    def __getitem__(self, key: str) -> JsonValue:
        alias = self._aliases.get(key)
        names = [key] if alias is None else [alias, key]
        # A recorded config records each name that is read. A family supports all of them.
        values = {name: self.config.get(name) for name in names}
        for name, value in values.items():
            if value is not None or name in self.config:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys(self.config)
        names |= dict.fromkeys(
            name for name, alias in self._aliases.items() if alias in self.config
        )
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)
