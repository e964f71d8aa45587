"""Tests of reading PyTorch files, compared with PyTorch, in every format that it writes."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.formats.torch_files import (
    MAX_NON_TENSORS,
    read_torch_folder,
    read_torch_header,
    read_torch_object,
    select_meta_files,
    select_model_files,
    select_transformers_files,
)
from tests.golden.make_torch import FOLDER
from tests.helpers.pickle_builder import (
    ONE_TENSOR,
    encode_int,
    encode_mapping,
    encode_tensor,
    make_pickle,
    make_zip_file,
    mutate,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.torch_reading import read_content, read_error, tensor_bytes

FUZZED = 500
TOLD = json.loads((FOLDER / "tensors.json").read_text())
FILES = [*sorted(FOLDER.glob("*-plain.bin")), *sorted(FOLDER.glob("*-zip.bin"))]


# What PyTorch writes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_read_torch_header_matches_golden_files(path: Path) -> None:
    header, content = read_torch_header(path, 7), path.read_bytes()
    expected = TOLD[path.stem.partition("-")[0]]
    assert {
        t.name: (t.dtype, list(t.shape), tensor_bytes(t, content).hex()) for t in header.tensors
    } == {
        key: (tensor["dtype"], tensor["shape"], tensor["bits"]) for key, tensor in expected.items()
    }
    assert {t.file for t in header.tensors} == {7}
    assert [t.offset for t in header.tensors] == sorted(t.offset for t in header.tensors)
    assert (header.file_name, header.size, header.mtime_ns) == (
        path.name,
        len(content),
        path.stat().st_mtime_ns,
    )


def test_read_torch_header_returns_byte_strides_of_views() -> None:
    header = read_torch_header(FOLDER / "views-zip.bin", 0)
    assert {t.name: t.strides for t in header.tensors} == {
        "big": None, "alias": None, "row": None, "scalar": None, "empty": None, "parameter": None,
        "transposed": (4, 32), "inside": (32, 4), "every_other": (32, 8), "one": (32, 4), "swapped": (2, 24, 8),
    }  # fmt: skip


def test_non_tensors_are_described() -> None:
    for kind in ("zip", "plain"):
        header = read_torch_header(FOLDER / f"wrapped-{kind}.bin", 0)
        prefix = f"wrapped-{kind}.bin: "
        assert tuple(str(text).removeprefix(prefix) for text in header.others) == (
            "`epoch` is 3", "`lr` is 0.5", "`optimizer` is a mapping of 2", "`dtype` is the name of a class",
            "`device` is a torch.device", "`note` is the text `x`", "`size` is a torch.Size",
            "`seen` is a list of 2" if kind == "plain" else "`seen` is a builtins.set",
        )  # fmt: skip


def test_non_tensors_are_limited(tmp_path: Path) -> None:
    many = {"w": encode_tensor()} | {f"k{i}": encode_int(i) for i in range(40)}
    non_tensors = read_content(tmp_path, make_zip_file(make_pickle(encode_mapping(many)))).others
    assert len(non_tensors) == MAX_NON_TENSORS + 1
    assert non_tensors[-1] == "x.bin: and 28 more"


def test_digest_covers_metadata_without_payload(tmp_path: Path) -> None:
    root, other_root = (
        encode_mapping({"w": encode_tensor()}),
        encode_mapping({"v": encode_tensor()}),
    )
    assert (
        read_content(tmp_path, make_zip_file(make_pickle(root))).digest
        != read_content(tmp_path, make_zip_file(make_pickle(other_root))).digest
    )


def test_random_views_match_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.helpers.torch_checkpoints import tensor_bytes as bits_of

    rng = random.Random(1)
    for turn in range(40):
        base = torch.randint(-99, 99, (rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 5)))
        base = base.to(
            rng.choice(
                [torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2, torch.complex64]
            )
        )
        state = {"base": base}
        for i in range(6):
            view = rng.choice(list(state.values()))
            if view.dim():
                axis = rng.randrange(view.dim())
                low = rng.randrange(view.shape[axis] + 1)
                view = rng.choice([
                    lambda v, axis=axis: v.transpose(0, axis),
                    lambda v, axis=axis, low=low: v.narrow(axis, low, v.shape[axis] - low),
                    lambda v, axis=axis: v.unsqueeze(axis),
                    lambda v, axis=axis: v.select(axis, 0) if v.shape[axis] else v,
                    lambda v, axis=axis: torch.flip(v, (axis,)) if v.dtype == torch.int8 else v,
                    lambda v: v[..., ::2],
                ])(view)  # fmt: skip
            state[f"v{i}"] = view
        path = tmp_path / "x.bin"
        torch.save(state, path, pickle_protocol=2 + turn % 4)
        content = path.read_bytes()
        tensors = {t.name: t for t in read_torch_header(path, 0).tensors}
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            k: t.shape for k, t in tensors.items()
        }
        assert all(
            tensor_bytes(tensors[key], content) == bits_of(value)
            for key, value in state.items()
            if value.numel()
        )


def test_parameters_and_tensors_with_attributes_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    marked, parameter = torch.arange(3.0), torch.nn.Parameter(torch.ones(2))
    marked.note = parameter.note = "mine"
    torch.save({"marked": marked, "parameter": parameter}, tmp_path / "x.bin")
    assert [t.name for t in read_torch_header(tmp_path / "x.bin", 0).tensors] == [
        "marked",
        "parameter",
    ]


def test_paths_of_python_3_13_beside_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    module = types.ModuleType("pathlib._local")
    monkeypatch.setattr(module, "PosixPath", PosixPath, raising=False)
    monkeypatch.setitem(sys.modules, "pathlib._local", module)
    monkeypatch.setattr(PosixPath, "__module__", "pathlib._local")
    torch.save({"a": torch.ones(2), "out": PosixPath("/x/y")}, tmp_path / "x.bin")
    header = read_torch_header(tmp_path / "x.bin", 0)
    assert [tensor.name for tensor in header.tensors] == ["a"]
    assert header.others == ("x.bin: `out` is a pathlib._local.PosixPath",)


NOT_CARRIED: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "quantised": (
        lambda t: t.quantize_per_tensor(t.ones(2), 0.1, 0, t.qint8),
        "it holds quantised tensors",
    ),
    "sparse": (lambda t: t.ones(2, 2).to_sparse(), "it holds sparse tensors"),
    "meta": (lambda t: t.ones(2, device="meta"), "which have no values"),
    "complex128": (lambda t: t.ones(2, dtype=t.complex128), "a dtype that is not supported"),
    "complex32": (lambda t: t.ones(2, dtype=t.complex32), "a dtype that is not supported"),
    "conjugate": (lambda t: t.ones(2, dtype=t.complex64).conj(), "conjugate or negative view"),
    "expanded": (lambda t: t.ones(2, 1).expand(2, 3), "save its `.contiguous()` copy"),
    "overlapping": (lambda t: t.arange(5.0).as_strided((3, 3), (1, 1)), "elements overlap"),
    "a whole module": (lambda t: t.nn.Linear(2, 2), "refers to `torch.nn.modules.linear.Linear`"),
    "a class of one's own": (lambda t: random.Random(), "refers to `random.Random`"),
}


@pytest.mark.parametrize(("make", "message"), NOT_CARRIED.values(), ids=NOT_CARRIED)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_objects_are_rejected_by_name(
    tmp_path: Path, make: Callable[[Any], object], message: str
) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "x": make(torch)}, tmp_path / "y.bin")
    error = read_error(tmp_path, (tmp_path / "y.bin").read_bytes())
    assert message in f"{error.what} {error.why}"
    assert error.hint


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_rejected(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "y.bin")
    assert "TorchScript" in read_error(tmp_path, (tmp_path / "y.bin").read_bytes()).why


SEEDS = [path.read_bytes() for path in FILES]


@pytest.mark.parametrize("seed", slow_except(range(3), (0,)))
def test_mutated_files_are_read_in_bounds_or_rejected(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reasons = set()
    for i in range(FUZZED):
        content = fuzzed(rng, i)
        try:
            header = read_content(tmp_path, content)
        except PrepError as error:
            reasons.add(error.why)
            continue
        reasons.add("read")
        assert all(0 <= t.byte_range[0] <= t.byte_range[1] <= len(content) for t in header.tensors)
    assert "read" in reasons
    assert len(reasons) > 30
    assert all(why.isprintable() for why in reasons)


def fuzzed(rng: random.Random, number: int) -> bytes:
    """Return a golden file mutated anywhere, at an end, or in its pickle."""
    content = SEEDS[number % len(SEEDS)]
    kind = rng.randrange(4)
    if kind == 0:
        return mutate(content, rng)
    if kind == 1:
        edge = min(900, len(content))
        return content[:-edge] + mutate(content[-edge:], rng)
    if kind == 2:
        return mutate(content[:600], rng) + content[600:]
    return make_zip_file(mutate(ONE_TENSOR, rng))


def test_files_before_pytorch_1_6_are_refused(tmp_path: Path) -> None:
    error = read_error(tmp_path, (FOLDER / "views-legacy.bin").read_bytes())
    assert error.what == "x.bin is not supported"
    assert error.why == "it has the format of PyTorch before version 1.6"
    assert "`torch.save(torch.load('x.bin'), 'x.bin')`" in str(error.hint)
    with pytest.raises(PrepError) as caught:
        read_torch_object(tmp_path / "x.bin")
    assert str(caught.value) == str(error)


def test_hint_for_files_before_pytorch_1_6_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    error = read_error(tmp_path, (FOLDER / "views-legacy.bin").read_bytes())
    code = str(error.hint).split("`")[1]
    exec(code, {"torch": torch})
    tensors = {t.name: t for t in read_torch_header(tmp_path / "x.bin", 0).tensors}
    content = (tmp_path / "x.bin").read_bytes()
    bits = {name: tensor_bytes(tensor, content).hex() for name, tensor in tensors.items()}
    assert bits == {name: tensor["bits"] for name, tensor in TOLD["views"].items()}


def test_repeated_containers_are_converted_once(tmp_path: Path) -> None:
    """50 references to a tuple of 50 references, 12 times, would be 50^12 conversions."""
    nested = b"Nq\x00" + (b"(" + b"h\x00" * 50 + b"tq\x00") * 12
    path = tmp_path / "optimizer.pt"
    path.write_bytes(make_zip_file(make_pickle(nested)))
    root = read_torch_object(path).root
    assert isinstance(root, tuple)
    assert len(root) == 50
    path.write_bytes(make_zip_file(make_pickle(nested, b"\x85" * 12)))
    with pytest.raises(PrepError, match="nests more than 16"):
        read_torch_object(path)


# Which files of a folder


def test_select_files_follows_names() -> None:
    index, single = "pytorch_model.bin.index.json", "pytorch_model.bin"
    kept = [
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "config.json",
        ".hidden.bin",
    ]
    assert select_model_files([index, single, "x.bin"]) == [index]
    assert select_model_files([single, "x.bin"]) == [single]
    assert select_model_files(["model.pth", *kept]) == ["model.pth"]
    assert select_model_files(["b.PT", "a.bin"]) == ["a.bin", "b.PT"]
    assert select_model_files([*kept, "consolidated.00.pth"]) == []
    named = [index, single, "pytorch_model-00001-of-00002.bin"]
    meta = "consolidated.00.pth"
    assert select_transformers_files([*named, meta, "model.pth", *kept]) == named
    assert select_meta_files([meta, "params.json", single]) == [meta]


def shards(folder: Path, pickles: Mapping[str, bytes]) -> Path:
    for file, pickled in pickles.items():
        (folder / file).write_bytes(make_zip_file(pickled))
    return folder


def index_of(folder: Path, weight_map: object) -> None:
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": "1"}, "weight_map": weight_map})
    )


A, B = (make_pickle(encode_mapping({key: encode_tensor()})) for key in "ab")


def test_read_torch_folder_orders_shards_by_number(tmp_path: Path) -> None:
    shards(tmp_path, {"pytorch_model-00002-of-00002.bin": A, "pytorch_model-00001-of-00002.bin": B})
    for _ in range(2):
        torch_folder = read_torch_folder(tmp_path)
        assert [(t.name, t.file) for t in torch_folder.tensors] == [("b", 0), ("a", 1)]
        assert [path.name[14:19] for path in torch_folder.files] == ["00001", "00002"]
        index_of(
            tmp_path,
            {"a": "pytorch_model-00002-of-00002.bin", "b": "pytorch_model-00001-of-00002.bin"},
        )


FOLDERS = {
    "a shard is missing": ({"pytorch_model-00001-of-00002.bin": A}, None, "1 of 2 files"),
    "a shard of the index is missing": ({"x.bin": A}, {"a": "x.bin", "b": "y.bin"}, "1 of 2 files"),
    "a tensor twice": (
        {"x-00001-of-00002.bin": A, "x-00002-of-00002.bin": A},
        None,
        "is in two files",
    ),
    "an index of something else": (
        {"x.bin": A},
        {"b": "x.bin"},
        "lack tensors that the index names",
    ),
    "an index that leads out": ({"x.bin": A}, {"a": "../x.bin"}, "is not a usable index"),
    "an index of other files": ({"x.bin": A}, {"a": "x.safetensors"}, "is not a usable index"),
    "two models": ({"a.bin": A, "b.pt": B}, None, "does not say which file the model is"),
    "an adapter": ({"adapter_model.bin": A}, None, "is an adapter, not a model"),
}


@pytest.mark.parametrize(("pickles", "index", "what"), FOLDERS.values(), ids=FOLDERS)
def test_read_torch_folder_rejects_inconsistent_folders(
    tmp_path: Path, pickles: Mapping[str, bytes], index: object, what: str
) -> None:
    shards(tmp_path, pickles)
    if index is not None:
        index_of(tmp_path, index)
    with pytest.raises(PrepError) as caught:
        read_torch_folder(tmp_path)
    assert what in caught.value.what
