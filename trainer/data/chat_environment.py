"""A Jinja sandbox for chat templates: deterministic, with limits of work and sizes.

A template computes by operators, methods of values, filters and calls. Each of them is checked
before it creates a value. Methods and filters without a check are not available.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import pass_context
from markupsafe import Markup

from trainer.data.chat_limits import (
    CALL_WORK,
    MAX_PRECISION,
    CountedSteps,
    OpaqueNamespace,
    RenderLimits,
    TemplateLimitError,
)

# Filters that are not deterministic, or that process HTML with a run time that the limits cannot bound.
REMOVED_FILTERS = ("random", "urlize", "xmlattr", "wordwrap", "striptags", "pprint")
# Filters that return a generator. Its items are counted where they are consumed.
LAZY_FILTERS = {
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
}
# Filters without a loop over their input, so that the size of the input is not counted.
CHEAP_FILTERS = {
    "length",
    "count",
    "first",
    "default",
    "d",
    "attr",
}
# Filters that `_with_counting_filters` inserts into the syntax tree of each template.
STEPS = "_steps"
SIZED = "_sized"
CONCAT = "_concat"

TEXT_METHODS = frozenset(
    [
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"),
        *(
            "startswith",
            "endswith",
            "find",
            "rfind",
            "index",
            "rindex",
            "count",
            "removeprefix",
            "removesuffix",
        ),
        *(
            "upper",
            "lower",
            "title",
            "capitalize",
            "swapcase",
            "casefold",
            "isalnum",
            "isalpha",
            "isascii",
        ),
        *(
            "isdecimal",
            "isdigit",
            "isidentifier",
            "islower",
            "isnumeric",
            "isprintable",
            "isspace",
            "istitle",
        ),
        *("isupper", "replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs"),
        *("unescape", "escape"),
    ]
)
METHODS: Mapping[type, frozenset[str]] = {
    str: TEXT_METHODS,
    dict: frozenset(["get", "items", "keys", "values", "copy"]),
    list: frozenset(["index", "count", "copy"]),
    tuple: frozenset(["index", "count"]),
    range: frozenset(["index", "count"]),
    int: frozenset(["bit_length", "is_integer"]),
    float: frozenset(["is_integer"]),
    bytes: frozenset(),
    type: frozenset(),
}


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. The limits count the work of one rendering at a time."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "%"])

    def __init__(self, extensions: list[type[Extension]]) -> None:
        # Compilation must not evaluate anything, because the limits count only while rendering.
        # Without the optimizer no expression is evaluated, and a `finalize` with a context keeps
        # constant outputs from being evaluated.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            optimized=False,
            finalize=_keep_value,
        )
        self.limits = RenderLimits()
        del self.globals["lipsum"]
        self.globals["namespace"] = OpaqueNamespace
        self.globals["raise_exception"] = _raise_error
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._limited_filter(name, function)
        for name in REMOVED_FILTERS:
            self.filters[name] = functools.partial(_refuse_filter, name)
        self.filters[STEPS] = self._count_steps
        self.filters[SIZED] = self.limits.measured
        self.filters[CONCAT] = lambda parts: "".join(map(str, parts))

    def compile_template(self, text: str) -> Template:
        """Compile a template with counted loops and containers.

        Raises:
            Exception: The text is not a template. Jinja and Python raise errors of many types.
        """
        tree = self.parse(text)
        _with_counting_filters(tree)
        tree.set_environment(self)
        return Template.from_code(
            self, self.compile(tree, filename="<template>"), self.make_globals(None)
        )

    def concat(self, pieces: Any) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - a hook of Jinja
        """Join the texts of an output, a macro or a block."""
        return self.limits.joined(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of an operator's result, then compute it."""
        if operator == "**":
            self.limits.check_power(left, right)
        elif operator == "*":
            self.limits.check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            self.limits.check_percent(left, right)
        elif operator in ("+", "-"):
            self.limits.check_sum(left, right)
        return self.limits.measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a checked `str.format` if `value` is this method of a text, else None."""
        if super().wrap_str_format(value) is None:
            return None
        template: str = value.__self__
        formatter = _Formatter(self)
        if isinstance(template, Markup):
            formatter = _EscapeFormatter(self, escape=template.escape)

        @functools.wraps(value)
        def format_checked(*arguments: Any, **named: Any) -> str:
            if value.__name__ == "format_map":
                (named,) = arguments
                arguments = ()
            self.limits.check_fields(template, [*arguments, *named.values()])
            return self.limits.measured(
                type(template)(formatter.vformat(template, arguments, named))
            )

        return format_checked

    def call(  # pyright: ignore[reportIncompatibleMethodOverride] - positional in Jinja's calls
        __self,  # noqa: N805 - the name of Jinja, so that templates may pass `self`
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Count the work of a call, check its arguments, then call the macro, function or method."""
        __self.limits.count_work(CALL_WORK)
        if isinstance(__obj, LoopContext) and args:
            args = (CountedSteps(args[0], __self.limits), *args[1:])
        elif isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            # `join` would consume a generator without counting its items.
            args = tuple(
                __self.limits.listed(value) if isinstance(value, Iterator) else value
                for value in args
            )
            __self._check_method(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        is_new = isinstance(result, str | int | list) or __obj is dict
        return __self.limits.measured(result) if is_new else result

    def _check_method(
        self,
        function: types.BuiltinMethodType | types.MethodType,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> None:
        """Check the size of a method's result before the call.

        An unavailable method raises SecurityError.
        """
        owner = function.__self__
        name = function.__name__
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if kind is None:
            return
        if name not in METHODS[kind]:
            raise SecurityError(
                f"the method {name!r:.60} of {kind.__name__} is not available in chat templates"
            )
        if isinstance(owner, str):
            self._check_text_method(name, owner, [*args, *named.values()])

    def _check_text_method(self, name: str, text: str, args: list[Any]) -> None:
        """Check the size of the text that a method of `text` returns."""
        if name in ("ljust", "rjust", "center", "zfill", "expandtabs") and args:
            self.limits.check_width(text, args[0])
        elif name == "replace" and len(args) > 1:
            self.limits.check_replace(text, args[0], args[1])
        elif name == "join" and args:
            self.limits.check_join(text, args[0])

    def _count_steps(self, items: Any) -> CountedSteps:
        return CountedSteps(items, self.limits)

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks its result and counts the characters of input and result."""
        has_context = hasattr(function, "jinja_pass_arg")
        check = CHECKS.get(name)

        @functools.wraps(function)
        def apply_checked(*args: Any, **named: Any) -> Any:
            first = args[: int(has_context)]
            value, *rest = args[int(has_context) :] or (None,)
            self.limits.count_work()
            if name not in CHEAP_FILTERS | LAZY_FILTERS and isinstance(value, Iterator):
                value = self.limits.listed(value)
            elif name not in CHEAP_FILTERS and isinstance(value, Sized):
                self.limits.count_work(len(value))
            if check:
                check(self.limits, value, *rest, **named)
            result = function(*first, value, *rest, **named)
            is_new = isinstance(result, str | int | list | tuple) and name not in CHEAP_FILTERS
            return self.limits.measured(result) if is_new else result

        return apply_checked


class _LimitedFields:
    """Fields of `str.format`. Their widths are checked after nested fields are replaced."""

    _env: ChatEnvironment

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.limits.check_field(format_spec)
        return super().format_field(value, format_spec)  # pyright: ignore[reportAttributeAccessIssue] - of Formatter


class _Formatter(_LimitedFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_LimitedFields, SandboxedEscapeFormatter):
    pass


def _with_counting_filters(node: nodes.Node) -> nodes.Node:
    """Return a syntax tree with filters that count loops and measure new containers."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _with_counting_filters(value))
        elif isinstance(value, list):
            setattr(
                node,
                name,
                [
                    _with_counting_filters(item) if isinstance(item, nodes.Node) else item
                    for item in value
                ],
            )
    if isinstance(node, nodes.For):
        node.iter = _apply_filter(node.iter, STEPS)
    if isinstance(node, nodes.Concat):
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _apply_filter(_apply_filter(parts, SIZED), CONCAT)
    is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    # The targets of an assignment are a tuple too.
    is_container = isinstance(node, nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    return _apply_filter(node, SIZED) if is_slice or is_container else node


def _refuse_filter(name: str, *args: Any, **named: Any) -> NoReturn:
    raise SecurityError(f"the filter {name!r} is not available in chat templates")


def _apply_filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _keep_value(context: Context, value: Any) -> Any:
    return value


def _raise_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, unlike Jinja's filter without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_json_filter(
    limits: RenderLimits, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *rest: Any,
    **named: Any,
) -> None:  # fmt: skip
    limits.check_json(value, indent, separators)


def _check_indent(
    limits: RenderLimits, text: Any, width: Any = 4, *rest: Any, **named: Any
) -> None:
    limits.check_width(text, width)


def _check_center(limits: RenderLimits, text: Any, width: Any = 80) -> None:
    limits.check_width(text, width)


def _check_format_filter(limits: RenderLimits, text: Any, *args: Any, **named: Any) -> None:
    limits.check_percent(str(text), named or args)


def _check_replace_filter(
    limits: RenderLimits, text: Any, old: Any, new: Any, *rest: Any, **named: Any
) -> None:
    limits.check_replace(text, old, new)


def _check_join_filter(
    limits: RenderLimits, values: Any, d: Any = "", *rest: Any, **named: Any
) -> None:
    limits.check_join(d, values)


def _check_batch(
    limits: RenderLimits, values: Any, linecount: Any = 0, fill_with: Any = None
) -> None:
    limits.check_count(linecount, fill_with)


def _check_slice(limits: RenderLimits, values: Any, slices: Any = 0, fill_with: Any = None) -> None:
    limits.check_count(slices, fill_with)


def _check_round(
    limits: RenderLimits, value: Any, precision: Any = 0, *rest: Any, **named: Any
) -> None:
    if isinstance(precision, int) and abs(precision) > MAX_PRECISION:
        raise TemplateLimitError(
            f"round has a precision of {precision:.3g}, the limit is {MAX_PRECISION}"
        )


def _check_sum(limits: RenderLimits, values: Any, *rest: Any, **named: Any) -> None:
    limits.count_chars(values)


# Filters with results that are larger than their values -> the check of their result
CHECKS: Mapping[str, Callable[..., None]] = {
    "tojson": _check_json_filter,
    "indent": _check_indent,
    "center": _check_center,
    "format": _check_format_filter,
    "replace": _check_replace_filter,
    "join": _check_join_filter,
    "batch": _check_batch,
    "slice": _check_slice,
    "round": _check_round,
    "sum": _check_sum,
}
