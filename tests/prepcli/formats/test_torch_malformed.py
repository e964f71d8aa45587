"""Tests of malformed PyTorch files: each error names the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.formats.torch_files import read_torch_header
from tests.helpers.pickle_builder import (
    encode_call,
    encode_int,
    encode_ints,
    encode_mapping,
    encode_name,
    encode_storage,
    encode_tensor,
    encode_text,
    encode_tuple,
    make_pickle,
    make_zip_file,
)
from tests.helpers.torch_reading import read_content, read_error


def with_tensor(made: bytes) -> bytes:
    return make_pickle(encode_mapping({"w": made}))


def parameter(depth: int, made: bytes) -> bytes:
    """Return a tensor wrapped in `depth` parameters."""
    for _ in range(depth):
        made = encode_call(
            "torch._utils._rebuild_parameter", made, b"\x89", encode_call("collections.OrderedDict")
        )
    return made


def with_storage(**changes: Any) -> bytes:
    return with_tensor(encode_tensor(storage=encode_storage(**changes)))


STATES = {
    "no mapping": (make_pickle(encode_int(3)), "it holds 3, not tensors by name"),
    "no tensors": (make_pickle(encode_mapping({"a": encode_int(3)})), "it holds no tensors"),
    "a name of a model twice": (
        make_pickle(
            encode_mapping(
                [
                    (encode_text("model"), encode_mapping({})),
                    (encode_text("model"), encode_mapping({"w": encode_tensor()})),
                ]
            )
        ),
        "it has `model` twice",
    ),
    "a tensor in ten parameters": (
        with_tensor(parameter(10, encode_tensor())),
        "not built as PyTorch builds a tensor",
    ),
    "a tensor of too many facts": (
        with_tensor(
            encode_call(
                "torch._utils._rebuild_tensor_v2",
                encode_storage(),
                encode_int(0),
                encode_ints((6,)),
                encode_ints((1,)),
                *[b"N"] * 9,
            )
        ),
        "not built as PyTorch builds a tensor",
    ),
    "a tensor with too many flags": (
        with_tensor(
            encode_call(
                "torch._utils._rebuild_tensor_v2",
                encode_storage(),
                encode_int(0),
                encode_ints((6,)),
                encode_ints((1,)),
                b"\x89",
                b"N",
                encode_mapping({f"flag {n}": b"\x89" for n in range(20)}),
            )
        ),
        "not built as PyTorch builds a tensor",
    ),
    "a list of tensors": (
        make_pickle(b"]", encode_tensor(), b"a"),
        "a list of 1, not tensors by name",
    ),
    "two models": (
        make_pickle(
            encode_mapping(
                {
                    "model": encode_mapping({"w": encode_tensor()}),
                    "module": encode_mapping({"w": encode_tensor()}),
                }
            )
        ),
        "in `model` and `module`, which",
    ),
    "a model within a model": (
        make_pickle(
            encode_mapping({"w": encode_tensor(), "model": encode_mapping({"w": encode_tensor()})})
        ),
        "in itself and `model`, which",
    ),
    "two models under other names": (
        make_pickle(
            encode_mapping(
                {
                    "ema": encode_mapping({"w": encode_tensor()}),
                    "net": encode_mapping({"w": encode_tensor()}),
                }
            )
        ),
        "in `ema` and `net`, which",
    ),
    "vectors under another name": (
        make_pickle(encode_mapping({"rng": encode_mapping({"cpu": encode_tensor((6,), (1,))})})),
        "it holds no tensors",
    ),
    "a name twice": (
        make_pickle(
            encode_mapping(
                [(encode_text("w"), encode_tensor()), (encode_text("w"), encode_tensor())]
            )
        ),
        "it has `w` twice",
    ),
    "a name that is a number": (
        make_pickle(encode_mapping([(encode_int(1), encode_tensor())])),
        "is not text, but 1",
    ),
    "a shape that is a text": (
        with_tensor(
            encode_call(
                "torch._utils._rebuild_tensor",
                encode_storage(),
                encode_int(0),
                encode_text("ab"),
                encode_ints((1,)),
            )
        ),
        "not a list of numbers",
    ),
    "a negative dim": (with_tensor(encode_tensor((2, -3))), "not a whole number"),
    "a negative stride": (with_tensor(encode_tensor((2, 3), (3, -1), 2)), "not a whole number"),
    "a negative offset": (with_tensor(encode_tensor(offset=-1)), "not a whole number"),
    "a dim of 2^63": (with_tensor(encode_tensor((2**63, 0), (1, 1))), "not a whole number"),
    "a dim that is True": (
        with_tensor(
            encode_call(
                "torch._utils._rebuild_tensor",
                encode_storage(),
                encode_int(0),
                encode_tuple(b"\x88"),
                encode_ints((1,)),
            )
        ),
        "not a whole number",
    ),
    "too many dims": (with_tensor(encode_tensor((1,) * 65, (1,) * 65)), "not a list of numbers"),
    "more strides than dims": (with_tensor(encode_tensor((6,), (1, 1))), "1 dims and 2 strides"),
    "an overflowing shape": (
        with_tensor(encode_tensor((2**40, 2**40, 0), (0, 0, 1))),
        "2^63 bytes or more",
    ),
    "beyond the storage": (
        with_tensor(encode_tensor(offset=1)),
        "reaches to byte 28 of a storage of 24",
    ),
    "far beyond the storage": (
        with_tensor(encode_tensor((2, 3), (2**62, 1))),
        "of a storage of 24",
    ),
    "no strides at all": (with_tensor(encode_tensor((2, 3), (0, 0))), "expanded view"),
    "an overlap": (with_tensor(encode_tensor((2, 3), (1, 1))), "elements overlap"),
    "a view in pieces": (
        with_tensor(encode_tensor((1 << 21, 1), (2, 1), storage=encode_storage(numel=1 << 22))),
        "2,097,152 pieces",
    ),
    "a storage that is a number": (
        with_tensor(encode_tensor(storage=encode_int(3))),
        "an object that is not a storage",
    ),
    "an id that is a text": (
        with_tensor(encode_tensor(storage=encode_text("0") + b"Q")),
        "an object that is not a storage",
    ),
    "an id of another kind": (
        with_tensor(
            encode_tensor(
                storage=encode_tuple(
                    encode_text("module"),
                    encode_name("torch.FloatStorage"),
                    encode_text("0"),
                    encode_text("cpu"),
                    encode_int(6),
                )
                + b"Q"
            )
        ),
        "an object that is not a storage",
    ),
    "a storage without a kind": (with_storage(kind="torch.Size"), "of an unknown type"),
    "a part of a storage": (
        with_tensor(
            encode_tensor(
                storage=encode_tuple(
                    encode_text("storage"),
                    encode_name("torch.FloatStorage"),
                    encode_text("0"),
                    encode_text("cpu"),
                    encode_int(6),
                    encode_tuple(encode_text("1"), encode_int(0), encode_int(6)),
                )
                + b"Q"
            )
        ),
        "a part of a storage",
    ),
    "a storage longer than its record": (
        with_storage(numel=7),
        "has 24 bytes, its tensors need 28",
    ),
    "a storage that is not there": (with_storage(key="1"), "no record `data/1`"),
    "a storage outside": (with_storage(key="../data.pkl"), "no record `data/../data.pkl`"),
    "too few arguments": (
        with_tensor(
            encode_call("torch._utils._rebuild_tensor_v2", encode_storage(), encode_int(0))
        ),
        "as PyTorch builds",
    ),
    "a parameter of nothing": (
        with_tensor(encode_call("torch._utils._rebuild_parameter", encode_int(3))),
        "as PyTorch builds",
    ),
    "a tensor with a state": (
        with_tensor(encode_tensor() + encode_mapping({}) + b"b"),
        "as PyTorch builds",
    ),
    "no dtype": (
        with_tensor(
            encode_call(
                "torch._utils._rebuild_tensor_v3",
                encode_storage(kind="torch.UntypedStorage"),
                encode_int(0),
                encode_ints((6,)),
                encode_ints((1,)),
                b"\x89",
                b"N",
                encode_text("float32"),
            )
        ),
        "dtype is unknown",
    ),
    "a class of its own": (
        with_tensor(
            encode_call(
                "torch._tensor._rebuild_from_type_v2",
                encode_name("torch._utils._rebuild_tensor"),
                encode_text("x"),
                encode_tuple(),
                b"N",
            )
        ),
        "a custom class",
    ),
}


@pytest.mark.parametrize(("pickled", "why"), STATES.values(), ids=STATES)
def test_invalid_tensors_are_rejected(tmp_path: Path, pickled: bytes, why: str) -> None:
    error = read_error(tmp_path, make_zip_file(pickled))
    assert error.what == "x.bin is not a usable PyTorch file"
    assert why in error.why
    assert error.why.isprintable()
    assert len(error.why) < 300


def test_storage_with_two_dtypes_is_read(tmp_path: Path) -> None:
    half = encode_tensor(storage=encode_storage(kind="torch.HalfStorage", numel=12))
    content = make_zip_file(make_pickle(encode_mapping({"w": encode_tensor(), "v": half})))
    dtypes = {t.name: t.dtype for t in read_content(tmp_path, content).tensors}
    assert dtypes == {"w": "float32", "v": "float16"}


OTHER = {
    "empty": (b"", "x.bin is damaged", "it is empty"),
    "zeros": (bytes(100), "x.bin is not a PyTorch file", "starts with 00 00"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "x.bin is a Git LFS pointer",
        "refers",
    ),
    "web page": (b"<!doctype html>", "x.bin is a web page", "error page"),
    "safetensors": (
        b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
        "x.bin is not a PyTorch file",
        "like a safetensors file",
    ),
    "tar": (b"x" * 257 + b"ustar\x00", "x.bin is not supported", "PyTorch before version 1.6"),
    "pickle": (make_pickle(encode_int(3)), "x.bin is not supported", "PyTorch before version 1.6"),
    "ggml": (b"lmgg" + bytes(20), "x.bin is a GGML file", "quantised"),
    "zip of something else": (b"PK\x03\x04", "x.bin is not a usable PyTorch file", "no directory"),
}


@pytest.mark.parametrize(("content", "what", "why"), OTHER.values(), ids=OTHER)
def test_read_torch_header_names_other_formats(
    tmp_path: Path, content: bytes, what: str, why: str
) -> None:
    error = read_error(tmp_path, content)
    assert what in error.what
    assert why in error.why


def test_special_files_are_rejected(tmp_path: Path) -> None:
    for make in (
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("nowhere"),
    ):
        path = tmp_path / f"{make.__code__.co_firstlineno}{make.__code__.co_consts}.bin"
        make(path)
        with pytest.raises(PrepError):
            read_torch_header(path, 0)
        path.rmdir() if path.is_dir() else path.unlink()
