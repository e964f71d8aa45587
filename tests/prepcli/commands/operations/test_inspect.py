"""`prep inspect`: leaves, pages and tables in narrow terminals."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations import plan
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.commands.pages.inspection_page import MAX_DRAWINGS, MAX_ROWS
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.sources.aliases import ALIASES
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.run_inspect import SMALL_LLAMA, make_model_and_init
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors
from tests.helpers.towers import write_model

DECODE = ("--quantized", "dequantize")
SCALES = "quantization.model.layers.*.mlp.up_proj.weight_scale_inv"


def inspect_json(capsys: Capture, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", *words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def shards(capsys: Capture, folder: str, leaf: str, *words: str) -> dict[str, Any]:
    return inspect_json(capsys, folder, "--shards", leaf, "--mesh", "1,2,2", *words)["shards"]


@pytest.mark.parametrize("method", slow_except(["fp8", "gptq", "awq", "nf4"], ["fp8", "nf4"]))
def test_stats_of_decoded_weights_are_those_of_the_values(method: str, capsys: Capture):
    values = make_quantized(Path("m"), method)
    tensors = inspect_json(capsys, "./m", "--stats", *DECODE)["tensors"]
    assert {tensor["name"] for tensor in tensors} == values.keys()
    for tensor in tensors:
        expected = values[tensor["name"]].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (tensor["dtype"], tensor["shape"]) == ("bfloat16", [*expected.shape])
        statistics = tensor["stats"]
        assert statistics["min"] == expected.min()
        assert statistics["max"] == expected.max()


def test_shards_of_quantised_weights_are_those_of_the_init(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "decoded", quantized="dequantize")
    for leaf in ("layers.attn.q.weight", "layers.mlp.up.weight"):
        expected = shards(capsys, "decoded", leaf)
        assert shards(capsys, "./m", leaf, *DECODE) == expected
        assert expected["dtype"] == "bfloat16"
    scales = shards(capsys, "decoded", SCALES)
    assert scales["shard"] == scales["shape"]
    assert scales["copies"] == 4
    prep.save_init("./m", "kept")
    leaf = "model.layers.*.self_attn.q_proj.weight"
    assert shards(capsys, "./m", leaf) == shards(capsys, "kept", leaf)


@pytest.mark.parametrize("model_type", slow_except(["llava", "qwen3_vl"], ["llava"]))
def test_shards_of_towers_are_the_chunks_of_the_init(model_type: str, capsys: Capture):
    write_model(model_type)
    run_ok("save-init", "./m", "--mesh", "1,2,2", "--pad-vocab", "auto", "--out", "init")
    leaves = [tensor.name for tensor in prep.inspect("init").tensors]
    towers = [name for name in leaves if name.startswith("towers.")]
    for leaf in towers[:8]:
        expected = shards(capsys, "init", leaf)
        assert shards(capsys, "./m", leaf) == expected
    assert any(shards(capsys, "./m", leaf)["copies"] == 1 for leaf in towers)


def test_decoding_without_effect_is_an_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    assert "is not quantised" in run_failing(capsys, 2, "inspect", "./m", *DECODE)
    make_quantized(Path("q"), "fp8")
    message = run_failing(capsys, 2, "inspect", "./q", "--diff", "./m", *DECODE)
    assert "`--quantized dequantize` has no effect" in message


def test_only_decoding_needs_the_scales_of_quantised_tensors(capsys: Capture):
    scale = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    make_quantized(Path("m"), "fp8", change=lambda stored: stored.pop(scale))
    run_ok("inspect", "./m")
    assert main(["inspect", "./m", *DECODE]) == 1


def test_page_has_decoded_weights(capsys: Capture):
    values = make_quantized(Path("m"), "fp8")
    run_ok("inspect", "./m", "--html", "page.html", *DECODE)
    page = Path("page.html").read_text()
    assert "weight_scale_inv" not in page
    assert all(name.rpartition(".")[2] in page for name in values)
    make_checkpoint(Path("dense"), LLAMA)
    error = run_failing(capsys, 2, "inspect", "./dense", "--html", "dense.html", *DECODE)
    assert "./dense is not quantised" in error
    words = ("--diff", "./dense", "--html", "diff.html", *DECODE)
    error = run_failing(capsys, 2, "inspect", "./m", *words)
    assert "compares the tensors as they are stored" in error


# `prep inspect --html`: the page of a checkpoint


VOID_TAGS = {"meta"}


class Page(HTMLParser):
    """Texts of a page. Reading it checks that every element is closed in the right order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(self.source)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def inspect_page(*arguments: str, code: int = OK) -> Page:
    """Run `prep inspect --html` and read the page."""
    assert main(["inspect", *arguments, "--html", "page.html", "-q"]) == code
    return Page(Path("page.html"))


def test_page_has_facts_tree_shards_and_statistics():
    tensors = make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    page = inspect_page("model")
    number_of_values = sum(tensor.size for tensor in tensors.values())
    assert f"parameters {number_of_values:,}" in page.text
    assert "{0..1}" in page.text
    assert "input_layernorm.weight" in page.text
    # Without a mesh there is nothing to split, and statistics would read the data.
    assert "device" not in page.text
    assert "Statistics" not in page.text
    page = inspect_page("model", "--mesh", "1,2,2", "--stats")
    # The page needs no network and no script.
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert "http" not in page.source
    # 12 rows over mp and 8 columns over fsdp: device 3 holds the last quarter of the embedding.
    assert "device 3: rows 6:12, columns 4:8" in page.text
    assert page.tags.count("section") <= MAX_DRAWINGS + 1
    name, values = next(iter(tensors.items()))
    row = page.texts.index(name)
    minimum, maximum = page.texts[row + 3 : row + 5]
    np.testing.assert_allclose(float(minimum), values.min(), rtol=1e-5)
    np.testing.assert_allclose(float(maximum), values.max(), rtol=1e-5)


def test_page_states_the_bytes_that_jax_places_on_a_device(capsys: Capture):
    make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "2,2,2")
    page = inspect_page("init")
    params = prep.load_params("init", mesh="2,2,2")
    on_first_device = 0
    total = 0
    for leaf in jax.tree.leaves(params):
        total += leaf.nbytes
        for shard in leaf.addressable_shards:
            if shard.device == jax.devices()[0]:
                on_first_device += shard.data.nbytes
    assert (
        f"Each device holds {on_first_device / 1024:.1f} KiB of {total / 1024:.1f} KiB" in page.text
    )


def test_mesh_of_the_user_replaces_the_mesh_of_the_manifest(capsys: Capture):
    make_model_and_init(capsys, SMALL_LLAMA, "--mesh", "1,2,2")
    assert "Parameters on 4 devices" in inspect_page("init").text
    assert "Parameters on 2 devices" in inspect_page("init", "--mesh", "1,1,2").text
    document = run_json(capsys, "inspect", "init", "--html", "page.html")
    assert document["output"] == "page.html"
    assert document["source"]["family"] == "llama"


def test_shards_of_large_meshes_are_drawn_as_text():
    config = SMALL_LLAMA | {"vocab_size": 128, "hidden_size": 128}
    make_checkpoint(Path("model"), config, files=1)
    page = inspect_page("model", "--mesh", "1,64,2")
    assert "vocab down; embed across" in page.text


def test_differences_are_listed_and_fail(capsys: Capture):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    make_checkpoint(Path("wide"), SMALL_LLAMA | {"intermediate_size": 24}, files=1)
    page = inspect_page("model", "--diff", "wide", code=FAILED)
    row = page.texts.index("model.layers.0.mlp.up_proj.weight")
    assert page.texts[row + 1 : row + 3] == ["[16, 8] float32", "[24, 8] float32"]
    assert "differ in 6 of 21 tensors" in capsys.readouterr().err


def test_hostile_names_are_escaped():
    Path("model").mkdir()
    name = '<script>alert("x")</script>&<b>'
    save_file({name: np.zeros((2, 2), np.float32)}, "model/model.safetensors")
    page = inspect_page("model", "--stats")
    assert "script" not in page.tags
    assert name in page.text


def test_long_trees_and_tables_are_cut():
    Path("model").mkdir()
    tensors = {f"t{number}x": np.zeros(1, np.float32) for number in range(MAX_ROWS + 5)}
    save_file(tensors, "model/model.safetensors")
    page = inspect_page("model", "--stats")
    # One table of statistics and one of the tree, each with the first rows.
    assert page.text.count("and 5 more") == 2
    assert sum(text in tensors for text in page.texts) == 2 * MAX_ROWS


# Options beside `--html page.html`, and a part of the error
REFUSED_PAGES = [
    (("--tree",), "`--tree"),
    (("--shards", "embed.tokens"), "`--shards"),
    (("--mesh", "1,1,5"), "5"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_PAGES)
def test_refused_options_write_no_page(options: tuple[str, ...], message: str, capsys: Capture):
    make_checkpoint(Path("model"), SMALL_LLAMA, files=1)
    words = ("inspect", "model", "--html")
    assert message in run_failing(capsys, USAGE, *words, "page.html", *options)
    assert not Path("page.html").exists()
    before = Path("model/config.json").read_bytes()
    assert main([*words, "model/config.json"]) == FAILED
    assert Path("model/config.json").read_bytes() == before


# Tables of the commands in terminals of 60, 80 and 120 columns: no line is longer, and no name is cut


WIDTHS = (60, 80, 120)


class Terminal(io.StringIO):
    """Stdout of a command in a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(folder, GPT_NEO)
    run_ok("save-init", str(folder), "--mesh", "1,1,1", "--out", str(folder.with_name("init")))
    return folder


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the result of its first call in each call."""
    results: list[Any] = []

    def first_result(*args: Any, **options: Any) -> Any:
        if not results:
            results.append(function(*args, **options))
        return results[0]

    return first_result


def run_in_terminal(monkeypatch: MonkeyPatch, width: int, *words: str) -> list[str]:
    """Run a command on a terminal of this width, and return the lines of stdout, none of which is longer."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", str(width))
        assert main([*words]) == OK
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in terminal.getvalue()
    return lines


def recipe_names() -> set[str]:
    return {path.stem for path in recipes_folder().glob("*.toml")}


# Command, and words that its table has whole
TABLES: list[tuple[str, Callable[[], set[str]]]] = [
    ("inspect model", lambda: set(read_tensors(Path("model")))),
    ("inspect model --stats", lambda: set(read_tensors(Path("model")))),
    ("inspect init", lambda: {"params.embed.tokens", "params.layers.attn.q.weight"}),
    ("inspect model --tree", lambda: {"attn.attention", "q_proj.weight", "wte.weight"}),
    ("models", lambda: {alias.name for alias in ALIASES} | {alias.hub_id for alias in ALIASES}),
    ("recipes", recipe_names),
    ("plan llama-7b-32k", lambda: {"A100-80"}),
]


@pytest.mark.parametrize("width", slow_except(WIDTHS, WIDTHS[:1]))
@pytest.mark.parametrize(("command", "names"), TABLES)
def test_tables_fit_the_terminal_with_whole_names(
    monkeypatch: MonkeyPatch, model: Path, command: str, names: Callable[[], set[str]], width: int
):
    monkeypatch.chdir(model.parent)
    lines = run_in_terminal(monkeypatch, width, *command.split())
    assert names() <= {word for line in lines for word in line.split()}


def test_plan_search_ends_with_the_best_mesh(monkeypatch: MonkeyPatch) -> None:
    # Both commands print the same search, which takes most of their time.
    monkeypatch.setattr(plan, "search_meshes", once(plan.search_meshes))
    search = ("plan", "llama-7b-32k", "--devices", "v5p", "--search")
    lines = run_in_terminal(monkeypatch, 80, *search)
    meshes = [line.split()[0] for line in lines if line.startswith("dp:")]
    assert len(meshes) == 10
    assert lines[-1] == f"best: `--mesh {meshes[0]}`"
    assert any(line.endswith(" slower ones that fit; `-v` lists all") for line in lines)
    all_lines = run_in_terminal(monkeypatch, 80, *search, "-v")
    assert len([line for line in all_lines if line.startswith("dp:")]) > 10
    assert all_lines[-1] == lines[-1]


def test_plan_search_lists_each_reason_on_a_line(monkeypatch: MonkeyPatch) -> None:
    lines = run_in_terminal(
        monkeypatch, 80, "plan", "llama-7b-32k", "--devices", "v5p:7", "--search"
    )
    assert "  1 x heads 32 cannot be split over mp 7" in lines


def test_unknown_leaf_is_a_short_error(
    monkeypatch: MonkeyPatch, model: Path, capsys: Capture
) -> None:
    monkeypatch.chdir(model.parent)
    assert main(["inspect", "model", "--shards", "nothing", "--mesh", "1,1,1"]) == USAGE
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) < 120
    assert lines[-1] == " hint: `prep save-init model --dry-run -v` shows the names"
