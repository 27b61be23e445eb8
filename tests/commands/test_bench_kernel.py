"""`mla-diag bench kernel`: what it says where it cannot run, and how it prints what it measured."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from mla_diag.bench.kernel_record import Record, read_record
from mla_diag.bench.rows import Ceilings, Row, Shape
from mla_diag.commands.common import parse_shape
from mla_diag.errors import UsageError
from mla_diag.report.json import render_json
from mla_diag.report.kernel_table import format_row
from tests.commands.invoke import Invoke

SVG = "{http://www.w3.org/2000/svg}"
OURS, FLOOR = "stroke: #009e73", "stroke-dasharray"


def test_without_a_gpu_it_says_so_in_one_line(run: Invoke):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run("bench", "kernel")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "mla-diag: bench kernel needs a GPU, and torch sees none here; run it where the server runs\n"
    )


def test_shapes():
    assert parse_shape("16x8192") == (16, 8192)
    for text in ("16", "0x5", "16x", "ax5", "16x8k"):
        with pytest.raises(UsageError, match=f"--shape {text}"):
            parse_shape(text)


def test_a_row_that_was_measured():
    row = Row(Shape(16, 64, 8192), "mla-diag triton", 130.0, 1.65e-3, 70.7)
    assert format_row(row).plain.split()[:5] == ["16", "64", "8192", "mla-diag", "triton"]
    assert format_row(row).plain.split()[5:] == ["130.0", "1.84", "x", "1.6e-03"]


def test_a_row_that_could_not_be():
    row = Row(Shape(16, 1, 2048), "native fp8", None, None, 0.3, "ImportError: No module named 'flashinfer'")
    assert format_row(row).plain.endswith("native fp8              -  ImportError: No module named 'flashinfer'")
    row = dataclasses.replace(row, reason="RuntimeError: CUDA error\nCompile with TORCH_USE_CUDA_DSA\n")
    assert format_row(row).plain.endswith("-  RuntimeError: CUDA error Compile with TORCH_USE_CUDA_DSA")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of two head counts and two shapes, in which one alternative could not run."""
    ceilings = Ceilings(bandwidth=4.25e12, matmul=786e12)
    rows = []
    for shape in (Shape(heads, batch, context) for heads in (16, 128) for batch, context in ((1, 2048), (64, 8100))):
        floor = ceilings.roofline_us(shape)
        rows += [
            Row(shape, "bf16 pool", 2.5 * floor, 1.6e-3, floor),
            Row(shape, "native fp8", None, None, floor, "ImportError: No module named 'flashinfer'"),
            Row(shape, "mla-diag triton", 1.5 * floor, 1.7e-3, floor),
        ]
    path = tmp_path / "kernel.json"
    path.write_text(render_json(Record("NVIDIA H200", ceilings, rows)))
    return path


def test_an_earlier_run_is_shown_without_a_gpu(run: Invoke, recorded: Path):
    result = run("bench", "kernel", "--from", recorded)
    assert (result.returncode, result.stderr) == (0, "")
    first, _, head, *rows = result.stdout.splitlines()
    assert first == "NVIDIA H200: copies at 4.25 TB/s, BF16 products at 786 TFLOP/s; a decode step of one layer:"
    assert head.split() == ["heads", "batch", "context", "us", "roofline", "error"]
    assert rows == [format_row(row).plain.rstrip() for row in read_record(recorded).rows]
    some = run("bench", "kernel", "--from", recorded, "--heads", "128", "--shape", "1x2048")
    assert some.stdout.splitlines()[3:] == rows[6:9]


def test_an_earlier_run_is_shown_where_torch_is_not_installed(
    run: Invoke, recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("torch", "triton", "mla_diag.bench.kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("bench", "kernel", "--from", recorded).returncode == 0


def test_a_picture_of_it(run: Invoke, recorded: Path, tmp_path: Path):
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert run("bench", "kernel", "--from", recorded, "--plot", picture).returncode == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first == second  # remaking it from the same run changes nothing
    assert len(first) < 300_000
    assert not re.search(rb"\d{4}-\d\d-\d\d", first)
    drawing = ElementTree.fromstring(first)
    words = ["".join(node.itertext()) for node in drawing.iter(f"{SVG}text")]
    assert {"16 query heads", "128 query heads", "1 x 2k", "64 x 8100", "microseconds a layer"} <= set(words)
    assert [words.count(name) for name in ("bf16 pool", "mla-diag triton", "roofline")] == [1, 1, 1]
    assert "native fp8" not in words  # it did not run
    lines = [re.findall(r"[\d.]+", node.get("d", "")) for node in drawing.iter(f"{SVG}path") if drawn(node, OURS)]
    assert len(lines) == 2  # one a panel
    floors = [re.findall(r"[\d.]+", node.get("d", "")) for node in drawing.iter(f"{SVG}path") if drawn(node, FLOOR)]
    for line, floor in zip(lines, floors, strict=True):
        # 1.5 times the roofline at each of the two shapes: on a logarithmic axis the same distance above it.
        above = [float(floor[place]) - float(line[place]) for place in (1, 3)]
        assert above[0] == pytest.approx(above[1])
        assert above[0] > 0


def drawn(node: ElementTree.Element, style: str) -> bool:
    """Whether it is a line of a panel in this style."""
    return style in node.get("style", "") and "clip-path" in node.attrib


def test_a_picture_takes_matplotlib_and_says_so_before_anything_is_measured(
    run: Invoke, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", "kernel", "--from", recorded, "--plot", tmp_path / "a.svg")
    assert result.stderr == (
        "mla-diag: --plot needs matplotlib, which is not installed; pip install 'mla-diag[plot]'\n"
    )
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--from", "missing.json"], 3, "missing.json: cannot be read: No such file or directory; check --from"),
        (["--from", "other.json"], 3, "other.json: not what `mla-diag bench kernel --json` writes"),
        (["--from", "newer.json"], 3, "newer.json: a run of schema version 9, and this mla-diag reads 1"),
        (["--from", "zero.json"], 3, "`mla-diag bench kernel --json` writes (a time is not above 0)"),
        (["--from", "kernel.json", "--plot", "a.png"], 2, "--plot a.png: the picture is SVG"),
        (["--from", "kernel.json", "--heads", "32"], 2, "kernel.json: nothing of these heads and shapes was recorded"),
        (["--from", "kernel.json", "--json", "again.json"], 2, "--from shows an earlier run"),
        (["--from", "kernel.json", "--plot", "missing/a.svg"], 2, "there is no directory missing"),
    ],
)
def test_what_is_wrong_is_one_line(
    run: Invoke, recorded: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, words: str
):
    monkeypatch.chdir(recorded.parent)
    Path("other.json").write_text('{"rows": []}')
    record = read_record(recorded)
    Path("newer.json").write_text(render_json(msgspec.structs.replace(record, schema_version=9)))
    rows = [dataclasses.replace(row, roofline_us=0.0) for row in record.rows]
    Path("zero.json").write_text(render_json(msgspec.structs.replace(record, rows=rows)))
    result = run("bench", "kernel", *options)
    (line,) = result.stderr.splitlines()
    assert result.returncode == code
    assert words in line


def test_a_run_in_which_nothing_ran_has_no_picture(run: Invoke, recorded: Path, tmp_path: Path):
    record = read_record(recorded)
    rows = [row for row in record.rows if row.us is None]
    recorded.write_text(render_json(Record(record.device, record.ceilings, rows)))
    result = run("bench", "kernel", "--from", recorded, "--plot", tmp_path / "a.svg")
    assert result.stderr == "mla-diag: --plot: no alternative ran, so there is nothing to draw\n"
    assert not (tmp_path / "a.svg").exists()
