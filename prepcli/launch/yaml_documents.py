"""YAML for Kubernetes and SkyPilot: quoted strings, and scripts as literal blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import yaml

from prepcli.core.errors import usage_error
from prepcli.core.json_values import JsonObject, JsonValue

# Keys that no YAML parser takes for another type. YAML 1.1 takes `y` and `n` for booleans.
PLAIN_KEY = re.compile("[A-Za-z][-A-Za-z0-9_./]+")


def yaml_text(documents: Iterable[JsonObject]) -> str:
    """Return mappings as YAML documents in block style.

    All strings are quoted or literal blocks. PyYAML would leave e.g. `1e3` plain, and the parser
    of Kubernetes would take it for a number.
    """
    return yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        # Folded lines would be hard to read in a manifest.
        width=math.inf,
    )


class _Dumper(yaml.SafeDumper):
    """Dumper with quoted strings, literal blocks for scripts, and without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        # A dict in two places, such as the requests and limits of resources, is written twice.
        return True


def _text_node(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{value[max(error.start - 20, 0) : error.end]!a} is not UTF-8"
        raise usage_error(what, "YAML is UTF-8", "rename the file") from None
    lines = value.split("\n")
    # Other line breaks than "\n" do not survive in a literal block.
    style = "|" if len(lines) > 1 and all(line.isprintable() for line in lines) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


def _list_node(dumper: _Dumper, values: list[JsonValue]) -> yaml.SequenceNode:
    node = dumper.represent_list(values)
    # Numbers in one line
    node.flow_style = bool(values) and all(isinstance(value, int) for value in values)
    return node


def _object_node(dumper: _Dumper, mapping: JsonObject) -> yaml.MappingNode:
    node = dumper.represent_dict(mapping)
    for key, _ in node.value:
        if PLAIN_KEY.fullmatch(key.value):
            # PyYAML still quotes the words that it takes for other types, such as `null`.
            key.style = None
    return node


_Dumper.add_representer(str, _text_node)
_Dumper.add_representer(list, _list_node)
_Dumper.add_representer(dict, _object_node)
