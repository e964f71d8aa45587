"""Tests of interpreting pickles, compared with Python's pickle. No code of a pickle runs."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.formats.torch_pickle import (
    MAX_OPCODES,
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    UnexpectedNameError,
    interpret_pickle,
)
from tests.helpers.pickle_builder import (
    MARK,
    START,
    encode_call,
    encode_int,
    encode_mapping,
    encode_name,
    encode_text,
    encode_tuple,
    make_pickle,
    mutate,
)
from tests.helpers.slow_cases import slow_except

EXPECTED = {
    "collections.OrderedDict",
    "builtins.set",
    "builtins.complex",
    "torch._utils._rebuild_tensor_v2",
    "a.B",
}
FUZZED = 500


def read(data: bytes) -> object:
    return interpret_pickle(data, EXPECTED)


def reason(data: bytes) -> str:
    """Return the reason why a pickle is rejected, or an empty text if it is read."""
    try:
        read(data)
    except ValueError as error:
        return str(error)
    return ""


def plain(value: object) -> object:
    """Convert an interpreted value to Python objects."""
    if isinstance(value, PickledMapping):
        return {plain(key): plain(item) for key, item in value.items}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**300), 2**300) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner, inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)  # fmt: skip


@given(value=values, protocol=st.integers(3, 5))
def test_plain_values_match_pickle_loads(value: object, protocol: int) -> None:
    assert plain(interpret_pickle(pickle.dumps(value, protocol) + b"rest", ())) == value


def test_mappings_and_sets_are_not_constructed() -> None:
    shared = ["x"]
    value = OrderedDict(a=1, b=shared, c=shared, d={"e": ()}, f=-1, g=2**40, h=1.5, i={3})
    for protocol in (2, 3, 4, 5):
        mapping = read(pickle.dumps(value, protocol))
        assert isinstance(mapping, PickledMapping)
        assert [key for key, _ in mapping.items] == list(value)
        items = {key: plain(item) for key, item in mapping.items if isinstance(key, str)}
        seen = items.pop("i")
        assert isinstance(seen, list | PickledCall)
        assert items == {key: plain(item) for key, item in value.items() if key != "i"}


def test_pickled_calls_are_recorded_and_not_made() -> None:
    call = read(
        make_pickle(encode_call("a.B", encode_int(3)) + encode_mapping({"x": encode_int(1)}) + b"b")
    )
    assert isinstance(call, PickledCall)
    assert (call.callee, call.args, plain(call.state)) == (PickledName("a.B"), (3,), {"x": 1})


def test_persistent_refs_have_their_ids() -> None:
    references = read(
        make_pickle(b"]", MARK, encode_text("b") + b"Q", encode_text("a") + b"Q", b"e")
    )
    assert isinstance(references, list)
    assert all(isinstance(reference, PersistentRef) for reference in references)
    assert [reference.persistent_id for reference in references] == ["b", "a"]


OUT = "a file that must not be"


class Payload:
    """Object whose pickle calls `os.system`."""

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (f"touch '{OUT}'",)


SYSTEM = encode_tuple(encode_text(f"touch '{OUT}'"))
PAYLOADS = {
    **{f"protocol {protocol}": pickle.dumps([Payload()], protocol) for protocol in range(6)},
    "GLOBAL and REDUCE": make_pickle(encode_name("os.system"), SYSTEM, b"R"),
    "by another name": make_pickle(encode_name("posix.system"), SYSTEM, b"R"),
    "eval": make_pickle(encode_name("builtins.eval"), encode_tuple(encode_text("1/0")), b"R"),
    "eval of Python 2": make_pickle(
        encode_name("__builtin__.eval"), encode_tuple(encode_text("1/0")), b"R"
    ),
    "STACK_GLOBAL": make_pickle(encode_text("os"), encode_text("system"), b"\x93", SYSTEM, b"R"),
    "STACK_GLOBAL through what is let in": make_pickle(
        encode_text("collections"), encode_text("OrderedDict.fromkeys"), b"\x93", b")R"
    ),
    "an attribute of what is let in": make_pickle(
        encode_text("a"), encode_text("B.__class__"), b"\x93", b")R"
    ),
    "INST": b"(" + encode_text(f"touch '{OUT}'") + b"ios\nsystem\n.",
    "OBJ": b"(" + encode_name("os.system") + encode_text(f"touch '{OUT}'") + b"o.",
    "NEWOBJ": make_pickle(encode_name("subprocess.Popen"), SYSTEM, b"\x81"),
    "NEWOBJ_EX": make_pickle(encode_name("subprocess.Popen"), SYSTEM, b"}", b"\x92"),
    "BUILD": make_pickle(
        b"}", encode_mapping({"__setstate__": encode_name("os.system")}), b"b", SYSTEM, b"b"
    ),
    "BUILD of a class": make_pickle(encode_name("a.B"), encode_mapping({"x": encode_int(1)}), b"b"),
    "REDUCE of a text": make_pickle(encode_text("os.system"), SYSTEM, b"R"),
    "REDUCE of what was made": make_pickle(encode_call("a.B"), SYSTEM, b"R"),
    "EXT1": START + b"\x82\x01.",
    "EXT2": START + b"\x83\x01\x00.",
    "EXT4": START + b"\x84\x01\x00\x00\x00.",
    "PERSID": START + b"Pos.system\n.",
    "NEXT_BUFFER": START + b"\x97.",
    "getattr": make_pickle(
        encode_name("builtins.getattr"), encode_tuple(encode_text("x"), encode_text("y")), b"R"
    ),
    "copyreg": make_pickle(
        encode_name("copyreg._reconstructor"), encode_tuple(encode_name("a.B")), b"R"
    ),
    "a pickle within": make_pickle(
        encode_name("torch.storage._load_from_bytes"), encode_tuple(b"C\x01."), b"R"
    ),
}


@pytest.mark.parametrize("data", PAYLOADS.values(), ids=PAYLOADS)
def test_payloads_are_rejected_and_not_run(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.__import__", _no_import)
    rejection = reason(data)
    monkeypatch.undo()
    assert rejection
    assert rejection.isprintable()
    assert list(tmp_path.iterdir()) == []


def _no_import(*names: object) -> None:
    raise AssertionError(f"something was imported: {names[0]}")


def test_unexpected_name_error_has_the_name() -> None:
    with pytest.raises(UnexpectedNameError) as caught:
        read(make_pickle(encode_name("os.system")))
    assert caught.value.name == "os.system"


BROKEN = {
    "nothing": b"",
    "no end": START + b"N",
    "end without a value": START + b".",
    "protocol 6": b"\x80\x06N.",
    "unknown opcode": b"\xff",
    "text cut short": START + b"X\x05\x00\x00\x00ab.",
    "text of 2^63 bytes": START + b"\x8d" + struct.pack("<Q", 2**63) + b".",
    "bytes of 2^64 - 1 bytes": START + b"\x8e" + struct.pack("<Q", 2**64 - 1) + b".",
    "bytearray of 2^62 bytes": START + b"\x96" + struct.pack("<Q", 2**62) + b".",
    "text of Python 2": START + b"U\x01a.",
    "text of Python 2 of -1 bytes": START + b"T\xff\xff\xff\xff.",
    "a long text": START + b"X" + struct.pack("<I", 2 << 20) + b"a" * (2 << 20) + b".",
    "a number of 2^31 - 1 bytes": START + b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "a number of -1 bytes": START + b"\x8b" + struct.pack("<i", -1) + b".",
    "a name without an end": START + b"cos" + b"x" * 5000,
    "a name that is not UTF-8": START + b"c\xff\n\xff\n.",
    "a text that is not UTF-8": START + b"X\x01\x00\x00\x00\xff.",
    "half a surrogate pair": START + b"X\x03\x00\x00\x00\xed\xa0\x80.",
    "what was not kept": START + b"h\x05.",
    "keeping nothing": START + b"q\x00.",
    "keeping a mark": START + b"(q\x00.",
    "doubling a mark": START + b"(2.",
    "no mark": START + b"t.",
    "taking a mark": START + b"(\x85.",
    "more than there is": START + b"K\x01\x87.",
    "appending to a number": START + b"K\x01K\x02a.",
    "an item of a list": START + b"]K\x01K\x02s.",
    "a key without a value": START + b"}(K\x01u.",
    "a key without a value in DICT": START + b"(K\x01d.",
    "a mapping of pairs": make_pickle(encode_call("collections.OrderedDict", b"](K\x01K\x02ta")),
    "a call with a list": START + encode_name("a.B") + b"]R.",
    "a state for a list": START + b"]}b.",
    "a name of numbers": START + b"K\x01K\x02\x93.",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_invalid_pickles_are_rejected(data: bytes) -> None:
    assert reason(data).isprintable()
    assert 5 < len(reason(data)) < 300


LENGTHS = {
    "bytes": b"B" + struct.pack("<I", 2 << 30),
    "text": b"\x8d" + struct.pack("<Q", 2 << 30),
    "number": b"\x8b" + struct.pack("<i", (2 << 30) - 1),
    "bytearray": b"\x96" + struct.pack("<Q", 2 << 30),
}


@pytest.mark.parametrize("opcode", LENGTHS.values(), ids=LENGTHS)
def test_stated_lengths_of_2_gib_allocate_nothing(opcode: bytes) -> None:
    tracemalloc.start()
    try:
        assert reason(START + opcode + b"x.") == "it is cut short"
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 1 << 20


DEEP = 400_000
BOMBS: dict[str, Callable[[], bytes]] = {
    "opcodes": lambda: START + b"N0" * MAX_OPCODES,
    "mappings": lambda: START + b"}" * (MAX_OPCODES + 1),
    "kept": lambda: (
        START
        + b"N"
        + b"".join(b"r" + struct.pack("<I", i) for i in range(MAX_OPCODES // 4)) * 5
        + b"."
    ),
}


@pytest.mark.parametrize("name", slow_except(BOMBS, ("opcodes",)))
def test_pickle_bombs_reach_the_opcode_limit(name: str) -> None:
    with pytest.raises(ValueError, match="opcodes"):
        read(BOMBS[name]())


NESTED = {
    "tuples": START + b")" + b"\x85" * DEEP + b".",
    "lists": START + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "calls": START
    + encode_name("a.B")
    + b"q\x000N"
    + b"\x85q\x01"
    + b"0h\x00h\x01R\x85q\x01" * (DEEP // 8)
    + b".",
    "a list in itself": START + b"]q\x00h\x00a.",
    "a mapping in itself": START + b"}q\x00K\x01h\x00s.",
    "doubled sharing": START + b"Nq\x00" + b"h\x00h\x00\x86q\x00" * 1000 + b".",
}


@pytest.mark.parametrize("data", NESTED.values(), ids=NESTED)
def test_deeply_nested_pickle_is_read(data: bytes) -> None:
    assert read(data) is not None


SEEDS = [
    pickle.dumps(
        {"a": [1, 2.5, "x", (None, True)], "b": {"c": b"bytes", "d": {1, 2}}, "e": 2**70}, protocol
    )
    for protocol in (2, 3, 4, 5)
] + [make_pickle(encode_mapping({"w": encode_call("a.B", encode_text("x") + b"Q", encode_int(3))}))]


@pytest.mark.parametrize("seed", slow_except(range(3), (0,)))
def test_mutated_pickles_are_read_or_rejected(seed: int) -> None:
    rng = random.Random(seed)
    reasons = set()
    for i in range(FUZZED):
        reasons.add(
            reason(
                mutate(SEEDS[i % len(SEEDS)], rng) if i % 10 else rng.randbytes(rng.randrange(60))
            )
        )
    assert "" in reasons
    assert len(reasons) > 20
    assert all(message.isprintable() for message in reasons)


def test_every_opcode_is_read_or_rejected_by_name() -> None:
    for opcode in pickletools.opcodes:
        rejection = reason(opcode.code.encode("latin-1") + b".")
        assert f"opcode {opcode.name}, " in rejection or "opcode" not in rejection
