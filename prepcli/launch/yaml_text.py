"""Values as YAML. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

RESERVED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")  # not strings in YAML 1.1

Yaml = str | int | bool | Sequence["Yaml"] | Mapping[str, "Yaml"]


def yaml_document(value: Mapping[str, Yaml]) -> str:
    """Return a mapping in block style. Strings are quoted or literal blocks: no parser takes one for another type."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Mapping[str, Yaml] | Sequence[Yaml]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{_key(key)}:", item)
    else:
        for item in value:
            yield from _item(item)


def _entry(head: str, value: Yaml) -> Iterator[str]:
    if isinstance(value, str) and _is_literal(value):
        yield f"{head} |"
        yield from (f"  {line}" if line else "" for line in value[:-1].split("\n"))
    elif isinstance(value, str | int) or not value:
        yield f"{head} {_scalar(value)}"
    else:
        yield head
        yield from (f"  {line}" for line in _lines(value))


def _is_literal(text: str) -> bool:
    """Return whether a text can be a literal block: printable lines, the last one complete, no outer blank lines."""
    lines = text[:-1].split("\n")
    is_framed = text.endswith("\n") and text[0].strip() and lines[-1]
    return bool(is_framed) and all(line.isprintable() for line in lines)


def _item(value: Yaml) -> Iterator[str]:
    if isinstance(value, str | int) or not value:
        yield f"- {_scalar(value)}"
        return
    for number, line in enumerate(_lines(value)):
        yield f"{'  ' if number else '- '}{line}"


def _scalar(value: Yaml) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _key(text: str) -> str:
    is_plain = text.isascii() and text.replace("-", "").replace("_", "").isalnum() and text[0].isalpha()
    return text if is_plain and text.lower() not in RESERVED else quoted(text)


def quoted(text: str) -> str:
    r"""Return a text in double quotes, where `\UXXXXXXXX` stands for characters that YAML refuses."""
    return f'"{"".join(map(_escape, text))}"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char == "\n":
        return "\\n"
    return char if char.isprintable() else f"\\U{ord(char):08X}"
