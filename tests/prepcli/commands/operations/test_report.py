"""`prep report`: the page of training runs."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, PrepError, UsageError
from prepcli.formats.manifest import RECIPE_FILE
from tests.helpers.run_cli import Capture, MonkeyPatch
from trainer.run.run_record import ENVIRONMENT_FILE, SAMPLES_FILE, folder_nbytes
from trainer.training.metrics import METRICS_FILE


def make_run(folder: Path, *, lr: float = 1e-3, num_lines: int = 30, **environment: Any) -> Path:
    """Write the files of a run without checkpoints."""
    folder.mkdir(parents=True)
    (folder / RECIPE_FILE).write_text(f'name = "{folder.name}"\nseed = 3\n[optimizer]\nlr = {lr}\n')
    lines: list[dict[str, Any]] = [
        {"step": 0, "eval_loss": 5.0, "eval_perplexity": 148.4, "eval_tokens": 90}
    ]
    for step in range(1, num_lines + 1):
        values = {"loss": 5 / step, "lr": lr / step, "grad_norm": None, "tokens": 128 * step}
        speed = {"skipped": 0, "seconds": 0.5, "tokens_per_s": 256.0}
        lines.append({"step": step, **values, **speed})
    (folder / METRICS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if environment:
        (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment))
    return folder


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


def test_page_has_curves_recipe_and_environment(tmp_path: Path, capsys: Capture):
    data = {"train_sequences": 1234}
    run = make_run(
        tmp_path / "one", steps=40, device_kind="TPU v5p", data=data, versions={"jax": "1"}
    )
    assert main(["report", str(run), "--json"]) == OK
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == str(run / "report.html")
    (summary,) = document["runs"]
    assert (summary["step"], summary["steps"]) == (30, 40)
    assert (summary["tokens"], summary["skipped"]) == (3840, 0)
    assert (summary["loss"], summary["eval_loss"], summary["tokens_per_s"]) == (5 / 30, 5.0, 256.0)
    page = Page(run / "report.html")
    titles = {"Training loss", "Evaluation loss", "Learning rate", "Tokens per second"}
    assert titles | {"Evaluation perplexity"} <= {*page.texts}
    assert page.count("svg") == 3, "loss, learning rate, tokens per second; no finite grad norm"
    # The evaluation was logged once, so a chart would have one dot.
    assert {"logged once", "148.4", "5"} <= {*page.texts}
    assert {"optimizer.lr", "1e-3", "TPU v5p", "1,234", "30 / 40"} <= {*page.texts}
    assert "viewport" in [fields.get("name") for tag, fields in page.tags if tag == "meta"]


def test_page_has_a_curve_of_each_further_metric(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with (run / METRICS_FILE).open("a") as file:
        file.write(
            '{"step": 31, "eval_top5_<b>": 0.5, "eval_name": "x", "eval_none": null, "tokens.web": 7}\n'
        )
    page = Page(prep.report(run).path)
    assert page.texts.index("Evaluation top5 <b>") > page.texts.index("Tokens per second")
    assert "Tokens of web" in page.texts
    assert not {"Evaluation name", "Evaluation none", "Evaluation tokens"} & {*page.texts}
    assert page.count("b") == 0


def test_page_requests_nothing_and_escapes_names(tmp_path: Path):
    run = make_run(tmp_path / "<b>&", host="<script>alert(1)</script>")
    page = Page(prep.report(run, tmp_path / "page.html").path)
    assert page.count("script") == page.count("link") == page.count("img") == page.count("b") == 0
    assert not re.search(r"https?://|url\(|@import", page.source)
    assert "<script>alert(1)</script>" in page.texts


def test_runs_are_overlaid_and_recipe_differences_marked(tmp_path: Path, capsys: Capture):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=3e-3)
    words = ("--out", str(tmp_path / "x.html"), "--json")
    assert main(["report", str(first), str(second), *words]) == OK
    assert json.loads(capsys.readouterr().out)["changed_keys"] == ["name", "optimizer.lr"]
    page = Page(tmp_path / "x.html")
    strokes = [attributes["stroke"] for tag, attributes in page.tags if tag == "polyline"]
    assert strokes == ["var(--color0)", "var(--color1)"] * 3
    rows = re.findall(r'<tr class="changed"><td><code>(.*?)</code>', page.source)
    assert rows == ["name", "optimizer.lr"]


def test_runs_of_one_recipe_have_no_table_of_differences(tmp_path: Path):
    runs = [make_run(tmp_path / name / "run") for name in "ab"]
    page = Page(prep.report(runs, tmp_path / "page.html").path)
    assert "No key differs." in page.texts
    runs = [make_run(tmp_path / name / "run", lr=lr) for name, lr in (("c", 1.0), ("d", 2.0))]
    assert "1 key differs." in Page(prep.report(runs, tmp_path / "page.html").path).texts


def test_runs_with_one_folder_name_are_shown_by_path(tmp_path: Path):
    paths = [make_run(tmp_path / name / "run") for name in ("a", "b")]
    report = prep.report(paths, tmp_path / "x.html")
    assert [run["run"] for run in report.runs] == [str(path) for path in paths]
    assert {str(path) for path in paths} <= {*Page(report.path).texts}


def test_run_without_metrics_has_a_page(tmp_path: Path):
    run = make_run(tmp_path / "new")
    (run / METRICS_FILE).unlink()
    report = prep.report(run)
    assert (report.path, report.runs[0]["loss"]) == (run / "report.html", None)
    assert Page(report.path).count("svg") == 0


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        (RECIPE_FILE, None, "is not a run"),
        (RECIPE_FILE, "x = ", "is not TOML"),
        (ENVIRONMENT_FILE, "{", "is not JSON"),
    ],
)
def test_damaged_runs_are_refused(tmp_path: Path, name: str, text: str | None, what: str):
    run = make_run(tmp_path / "run")
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_text(text)
    with pytest.raises(PrepError, match=what):
        prep.report(run)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (METRICS_FILE, '{"step": 31, "loss": "text", "tokens": null, "mfu": NaN, "skipped": "x"}'),
        (METRICS_FILE, '{"step": 31, "loss": [1], "tokens": -Infinity, "eval_loss": {}}'),
        (METRICS_FILE, f'{{"step": 1{"0" * 400}, "loss": 1{"0" * 400}}}'),
        (ENVIRONMENT_FILE, '{"steps": "many", "data": 3, "versions": null}'),
        (ENVIRONMENT_FILE, '{"steps": NaN, "data": {"digest": null}, "versions": {"jax": []}}'),
        (ENVIRONMENT_FILE, "[]"),
    ],
)
def test_damaged_values_count_as_missing(tmp_path: Path, name: str, line: str):
    run = make_run(tmp_path / "run")
    with (run / name).open("a") as file:
        file.write(f"{line}\n")
    (summary,) = prep.report(run).runs
    assert (summary["loss"], summary["tokens"]) == (5 / 30, 3840)
    assert (summary["steps"], summary["mfu"]) == (None, None)


def test_speed_columns_are_medians(tmp_path: Path):
    run = make_run(tmp_path / "run")
    lines = [
        {"step": 31 + n, "mfu": mfu, "tokens_per_s": 256} for n, mfu in enumerate((0.4, 0.5, 0.01))
    ]
    with (run / METRICS_FILE).open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    assert prep.report(run).runs[0]["mfu"] == 0.4


def test_best_loss_compares_only_equal_numbers_of_tokens(tmp_path: Path):
    """A run that is resumed with another `eval.limit` evaluates on other sequences."""
    run = make_run(tmp_path / "run", num_lines=10)
    losses = [(20, 3.0, 90), (31, 4.5, 180), (32, 4.2, 180), (33, 4.3, 180), (34, None, 180)]
    lines = [
        json.dumps({"step": step, "eval_loss": loss, "eval_tokens": n}) + "\n"
        for step, loss, n in losses
    ]
    with (run / METRICS_FILE).open("a") as file:
        file.writelines(lines)
    (summary,) = prep.report(run, tmp_path / "a.html").runs
    assert (summary["eval_loss"], summary["best_eval_loss"]) == (4.3, 4.2)
    (run / METRICS_FILE).write_text("".join(lines[:1]))
    (summary,) = prep.report(run, tmp_path / "b.html").runs
    assert summary["best_eval_loss"] == 3.0


def test_no_runs_are_refused():
    with pytest.raises(UsageError, match="no runs"):
        prep.report([])


def test_folder_names_need_not_be_utf8(tmp_path: Path):
    run = make_run(tmp_path / "run").rename(tmp_path / os.fsdecode(b"run-\xff"))
    assert "<h1>run-\\udcff</h1>" in prep.report(run).path.read_text("utf-8")


def test_page_of_many_runs_has_their_number(tmp_path: Path):
    runs = [make_run(tmp_path / f"run{n}", lr=n / 8) for n in range(8)]
    report = prep.report(runs, tmp_path / "x.html")
    assert report.changed_keys == ("name", "optimizer.lr")
    assert "<h1>8 runs</h1>" in report.path.read_text()


@pytest.mark.parametrize("name", [RECIPE_FILE, METRICS_FILE])
def test_page_replaces_no_file_of_a_run(tmp_path: Path, capsys: Capture, name: str):
    run = make_run(tmp_path / "run")
    content = (run / name).read_bytes()
    assert main(["report", str(run), "--out", str(run / name)]) == FAILED
    assert "it is not a page of prep" in capsys.readouterr().err
    assert (run / name).read_bytes() == content


def test_page_follows_no_link(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (tmp_path / "private.html").write_text("private")
    (run / "report.html").symlink_to(tmp_path / "private.html")
    with pytest.raises(PrepError, match="it is a symbolic link"):
        prep.report(run)
    assert (tmp_path / "private.html").read_text() == "private"


def test_damaged_lines_are_skipped_with_a_note(tmp_path: Path, capsys: Capture):
    run = make_run(tmp_path / "run")
    long = '{"step": 1' + " " * (1 << 20) + "}"
    lines = ["[" * 100_000, long, '{"step": ' + "9" * 5000 + "}", "\0" * 100, "{}"]
    for name in (METRICS_FILE, SAMPLES_FILE):
        with (run / name).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.write('{"step": 2, "los')
    assert main(["report", str(run)]) == OK
    out, err = capsys.readouterr()
    assert "0.1667" in out
    assert f"skipped 5 lines of {run / METRICS_FILE}" in err
    assert f"skipped 5 lines of {run / SAMPLES_FILE}" in err


@pytest.mark.parametrize("name", [METRICS_FILE, SAMPLES_FILE, ENVIRONMENT_FILE])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_files_of_a_run_must_be_regular(tmp_path: Path, name: str, kind: str):
    path = make_run(tmp_path / "run") / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(PrepError, match=f"{name} is not a file"):
        prep.report(path.parent)


def test_deep_environment_is_an_error(tmp_path: Path):
    run = make_run(tmp_path / "run")
    (run / ENVIRONMENT_FILE).write_text('{"data":' * 100_000)
    with pytest.raises(PrepError, match="nested more than 100 levels deep"):
        prep.report(run)


def test_report_of_a_long_run_shows_64_sample_texts(tmp_path: Path):
    run = make_run(tmp_path / "run")
    texts = [*(f"text {step}" for step in range(1000)), "x" * 100_000]
    with (run / SAMPLES_FILE).open("w") as file:
        for step, text in enumerate(texts):
            file.write(json.dumps({"step": step, "prompt": "p", "text": text}) + "\n")
    page = Page(prep.report(run).path)
    assert "64 of 1,001 texts" in page.texts
    assert {"text 0", "text 16"} < {*page.texts}
    assert len(page.source) < 100_000


def test_step_may_be_removed_meanwhile(tmp_path: Path, monkeypatch: MonkeyPatch):
    folder, stat = tmp_path / "3", os.stat
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(b"12345")

    def stat_or_fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("/b"):
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", stat_or_fail)
    assert folder_nbytes(folder) == 5


def test_page_in_an_object_store_is_refused(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"gs://bucket/page\.html"):
        prep.report(run, "gs://bucket/page.html")
