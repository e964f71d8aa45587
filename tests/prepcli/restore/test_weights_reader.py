"""WeightsReader: leaves of other formats, windows of tensors against NumPy, and stored duplicates."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

import _thread
import itertools
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, strides, volume
from prepcli.algebra.strided_copies import StridedCopy, leaf_box_parts, part_copies, tensor_box
from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import PAGE
from prepcli.models.param_tree import flatten_tree
from prepcli.planning.arrays import location_copies, whole_array
from prepcli.planning.plan import EqualityCheck
from prepcli.restore.box_reads import (
    StoppedReadsError,
    file_strides,
    merge_windows,
    run_jobs,
    span_nbytes,
    split_into_spans,
    split_window,
)
from prepcli.restore.weights_reader import WeightsReader, find_duplicates
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import Source
from prepcli.stores.buffers import ByteArray
from tests.helpers.plans import flat
from tests.helpers.run_cli import run_ok
from tests.helpers.strategies import axis_maps, boxes, leaf_by_numpy, random_tensors
from tests.helpers.tiny_checkpoints import (
    ALL_CONFIGS,
    GPT2,
    LLAMA,
    make_checkpoint,
    write_checkpoint,
)
from trainer.nn.model_spec import model_from_manifest


def read_leaf(reader: WeightsReader, name: str, dtype: str = "float32") -> np.ndarray:
    values = np.full(reader.leaves[name].shape, np.nan, dtype)
    reader.read(name, {tuple((0, extent) for extent in values.shape): values})
    return values


def open_weights(folder: Path, vocab_multiple: int = 1) -> WeightsReader:
    return WeightsReader(open_source(locate(str(folder))), vocab_multiple)


@pytest.mark.parametrize("base", ALL_CONFIGS, ids=lambda base: base["model_type"])
def test_read_returns_the_leaves_of_the_model(base: dict[str, Any], tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", base, legacy=True)
    tensor_names = {location.tensor for location in tiny_transformer(base).locations}
    expected = flatten_tree(
        tiny_transformer(base).params_from_tensors(
            {name: tensor for name, tensor in tensors.items() if name in tensor_names}
        )
    )
    with open_weights(tmp_path / "m") as reader:
        assert {*reader.leaves} == {f"params.{path}" for path in expected}
        assert {
            path: leaf.shape for path, leaf in model_from_manifest(reader.manifest).leaves.items()
        } == {path: leaf.shape for path, leaf in expected.items()}
        for path, leaf in expected.items():
            np.testing.assert_array_equal(read_leaf(reader, f"params.{path}"), leaf)


def test_vocab_padding_is_zeros_and_recorded(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA)
    with open_weights(tmp_path / "m") as plain, open_weights(tmp_path / "m", 8) as padded:
        model = model_from_manifest(padded.manifest)
        assert (model.true_vocab_size, model.leaves["head.weight"].shape) == (131, (136, 32))
        for name in ("params.embed.tokens", "params.head.weight"):
            np.testing.assert_array_equal(read_leaf(padded, name)[:131], read_leaf(plain, name))
            assert not read_leaf(padded, name)[131:].any()


def test_read_writes_no_zeros_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Zeros in every array would touch all its pages in one thread, before the first byte is read."""
    make_checkpoint(tmp_path / "m", LLAMA)
    monkeypatch.setattr(WeightsReader, "run_reads", lambda *arguments: [])
    with open_weights(tmp_path / "m", 8) as reader:
        assert np.isnan(read_leaf(reader, "params.layers.attn.q.weight")).all()
        assert not read_leaf(reader, "params.embed.tokens").any()


@pytest.mark.parametrize("options", [("--no-scan",), ("--scan-axis", "1", "--rule", "embed=mp")])
def test_layers_are_stacked_on_axis_0_for_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--pad-vocab", "8", *options, "--out", "init")
    with open_weights(Path("m"), 8) as expected, open_weights(Path("init"), 8) as reader:
        assert {*reader.leaves} == {*expected.leaves}
        assert len(reader.manifest["rules"]) == len(options) // 4
        for name in expected.leaves:
            np.testing.assert_array_equal(read_leaf(reader, name), read_leaf(expected, name))


def test_leaf_of_mixed_dtypes_is_float32(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", LLAMA)
    path = "model.layers.{}.mlp.up_proj.weight"
    mixed = tensors | {path.format(0): tensors[path.format(0)].astype(np.float16)}
    config = json.loads((tmp_path / "m/config.json").read_text())
    write_checkpoint(tmp_path / "mixed", config, mixed)
    name = "params.layers.mlp.up.weight"
    with open_weights(tmp_path / "mixed") as reader:
        assert reader.leaves[name].dtype == "float32"
        for layer, values in enumerate(read_leaf(reader, name)):
            np.testing.assert_array_equal(values.reshape(-1), mixed[path.format(layer)].reshape(-1))


def test_untied_head_of_a_tied_model_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    head = tensors["transformer.wte.weight"].copy()
    write_checkpoint(tmp_path / "same", GPT2, tensors | {"lm_head.weight": head})
    with open_weights(tmp_path / "same") as reader:
        assert "params.head.weight" not in reader.leaves
    head[7, 3] += 1
    write_checkpoint(tmp_path / "other", GPT2, tensors | {"lm_head.weight": head})
    difference = r"lm_head.weight is not equal to transformer.wte.weight .* at \[7, 3\]"
    with open_weights(tmp_path / "other") as reader, pytest.raises(PrepError, match=difference):
        read_leaf(reader, "params.embed.tokens")


def test_missing_tensor_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    write_checkpoint(tmp_path / "less", GPT2, tensors)
    with pytest.raises(PrepError, match="missing"):
        open_weights(tmp_path / "less")


CHECK = EqualityCheck("lm_head.weight", "wte.weight")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Open a tied model whose stored head differs from the embedding."""
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    write_checkpoint(
        tmp_path / "tied", GPT2, tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}
    )
    return open_source(locate(str(tmp_path / "tied")))


def with_digests(source: Source, embedding: str, head: str) -> Source:
    """Return the source with digests of embedding and head."""
    digests = {CHECK.duplicate_of: embedding, CHECK.name: head}
    tensors = (
        replace(tensor, digests=((0, tensor.shape[0], digests[tensor.name]),))
        if tensor.name in digests
        else tensor
        for tensor in source.tensors
    )
    return replace(source, tensors=tuple(tensors))


def test_duplicates_without_digests_are_left_to_the_read(source: Source):
    duplicates = find_duplicates(source, [CHECK], verify=True)
    assert {name: [tensor.name for tensor in tensors] for name, tensors in duplicates.items()} == {
        "wte.weight": ["lm_head.weight"]
    }


def test_equal_digests_need_no_bytes(source: Source):
    assert not find_duplicates(with_digests(source, "0a", "0a"), [CHECK], verify=True)


def test_bytes_are_compared_if_digests_differ(source: Source):
    with pytest.raises(PrepError, match=r"lm_head.weight is not equal"):
        find_duplicates(with_digests(source, "0a", "0b"), [CHECK], verify=True)
    assert find_duplicates(with_digests(source, "0a", "0b"), [CHECK], verify=False)


DTYPE = "float32"
ITEM = 4


def elements(copy: StridedCopy) -> list[tuple[int, int]]:
    """Return (tensor offset, file offset) of each byte of a copy."""
    moves = itertools.product(*(range(count) for count, _, _ in copy.dims), range(copy.width))
    strides_of = [*((tensor, file) for _, tensor, file in copy.dims), (1, 1)]
    starts = (copy.tensor_offset, copy.file_offset)

    def offset(index: tuple[int, ...], side: int) -> int:
        return starts[side] + sum(i * step[side] for i, step in zip(index, strides_of))

    return [(offset(index, 0), offset(index, 1)) for index in moves]


@st.composite
def shaped_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes in it that are not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, [draw(boxes(shape).filter(volume)) for _ in range(draw(st.integers(1, 4)))]


@given(axis_maps(), st.data())
def test_windows_of_the_parts_of_a_box_fill_it(row: AxisMap, data: st.DataObject):
    tensors, box = random_tensors(row), data.draw(boxes(row.leaf_shape))
    expected = leaf_by_numpy(row, tensors)[tuple(slice(*span) for span in box)]
    out = np.zeros(expected.size, tensors[next(iter(tensors))].dtype)
    for part in leaf_box_parts(row, box):
        window = tensor_box(row, part.atom_ranges)
        for piece in split_window(window, strides(row.source_shape), data.draw(st.integers(1, 5))):
            values = tensors[part.tensor_name][tuple(slice(*span) for span in piece)].reshape(-1)
            for copy in part_copies(row, part, window=piece):
                for tensor_offset, file_offset in elements(copy):
                    out[file_offset] = values[tensor_offset]
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)


@given(shaped_boxes(), st.permutations(range(3)), st.booleans())
def test_copies_of_a_window_read_its_elements(
    drawn: tuple[tuple[int, ...], list[Box]], order: list[int], is_view: bool
):
    shape, (window, *_) = drawn
    tensor = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    axes = [axis for axis in order if axis < len(shape)] if is_view else list(range(len(shape)))
    stored = np.ascontiguousarray(tensor.transpose(axes))
    view_strides = tuple(stored.transpose(np.argsort(axes)).strides)
    placement = (whole_array("w", DTYPE, shape, (0, 8), view_strides if is_view else None),)
    file_bytes = np.concatenate([np.zeros(8, np.uint8), stored.reshape(-1).view(np.uint8)])
    out = np.zeros(volume(window) * ITEM, np.uint8)
    for copy in location_copies(placement, window, window):
        for span in split_into_spans(copy, max_nbytes=24, min_gap_nbytes=9):
            assert span_nbytes(span) <= max(24, copy.width)
            for tensor_offset, file_offset in elements(span):
                out[tensor_offset] = file_bytes[file_offset]
    expected = tensor[tuple(slice(*span) for span in window)]
    np.testing.assert_array_equal(out.view(np.int32).reshape(expected.shape), expected)


@given(shaped_boxes(), st.integers(1, 40))
def test_merged_windows_cover_the_windows(drawn: tuple[tuple[int, ...], list[Box]], max_gap: int):
    shape, windows = drawn
    merged = merge_windows(windows, file_strides((flat("int8", shape),), shape, 1), max_gap)
    assert len(merged) <= len(windows)
    for window in windows:
        assert any(
            all(a <= low and high <= b for (low, high), (a, b) in zip(window, box))
            for box in merged
        )


@given(shaped_boxes(), st.integers(1, 20), st.permutations([1, 7, 50]))
def test_split_window_has_each_element_once(
    drawn: tuple[tuple[int, ...], list[Box]], max_volume: int, axis_strides: list[int]
):
    shape, (window, *_) = drawn
    counts = np.zeros(shape, int)
    for piece in split_window(window, axis_strides, max_volume):
        assert 0 < volume(piece) <= max_volume
        counts[tuple(slice(*span) for span in piece)] += 1
    expected = np.zeros(shape, int)
    expected[tuple(slice(*span) for span in window)] = 1
    np.testing.assert_array_equal(counts, expected)


def test_adjacent_windows_and_short_gaps_are_merged():
    axis_strides = (100, 1)
    rows: list[Box] = [((0, 2), (0, 50)), ((2, 4), (0, 50)), ((9, 10), (0, 50))]
    assert merge_windows(rows, axis_strides, 32) == [((0, 4), (0, 50)), ((9, 10), (0, 50))]
    columns: list[Box] = [((0, 4), (0, 5)), ((0, 4), (20, 30)), ((0, 4), (90, 100))]
    assert merge_windows(columns, axis_strides, 32) == [((0, 4), (0, 30)), ((0, 4), (90, 100))]
    assert file_strides((flat("int16", (3, 5)),), (3, 5), 2) == (10, 2)


def test_call_without_jobs_waits_for_no_buffer():
    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    buffers.acquire(1)

    def run(job: int, buffer: ByteArray) -> None:
        raise AssertionError("there is no job")

    thread = threading.Thread(target=run_jobs, args=(iter(()), run, buffers, 2), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_jobs_run_with_fewer_buffers_than_threads():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        assert buffer.size > 0
        numbers.append(job)

    errors = run_jobs(iter(range(20)), run, BufferPool(Budget(PAGE, PAGE, 1)), 4)
    assert errors == []
    assert sorted(numbers) == list(range(20))


def test_call_starts_no_thread_without_a_job(monkeypatch: pytest.MonkeyPatch):
    start_new_thread = _thread.start_new_thread
    started: list[int] = []

    def start(*args: Any) -> int:
        started.append(start_new_thread(*args))
        return started[-1]

    monkeypatch.setattr(_thread, "start_new_thread", start)
    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    assert run_jobs(iter(range(2)), lambda job, buffer: None, buffers, 8) == []
    assert len(started) == 2


def test_stopped_call_drops_its_jobs_and_returns_an_error():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        numbers.append(job)

    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    errors = run_jobs(iter(range(20)), run, buffers, 1, is_stopped=lambda: len(numbers) == 3)
    assert numbers == [0, 1, 2]
    assert [type(error) for error in errors] == [StoppedReadsError]
