"""The table of a benchmark: what stands where, and what is missing on one side."""

from __future__ import annotations

import io

from rich.console import Console

from mla_diag.bench.agreement import Agreement
from mla_diag.bench.measure import LeftOut, Measured, Row, Spread
from mla_diag.bench.server import ServerBench, ServerSide, gains
from mla_diag.diagnose.step_spans import Stage
from mla_diag.report.bench import print_bench


def measured(row: Row, tpot: float) -> Measured:
    spread = Spread(tpot, tpot - 0.5, tpot + 0.5)
    return Measured(row, 65, 5, Spread(250.0, 240.0, 1300.0), spread, Spread(4000.0, 3900.0, 4100.0))


def side(*rows: Measured, left_out: tuple[LeftOut, ...] = ()) -> ServerSide:
    return ServerSide("0.5.17", "fp8_e4m3", 495_552, "flashinfer", "fa3", list(rows), list(left_out))


def lines(bench: ServerBench) -> list[str]:
    text = io.StringIO()
    print_bench(bench, Console(file=text, width=200), top=3)
    return text.getvalue().splitlines()


def test_one_server():
    shown = lines(ServerBench(None, "http://host:30000", side(measured(Row(16, 2000), 7.0)), notes=["no profile"]))
    assert shown[:3] == [
        "http://host:30000",
        "SGLang 0.5.17, flashinfer, fa3, KV fp8_e4m3, a pool of 495,552 tokens",
        "65 new tokens a request; median of 5 waves (least to most)",
    ]
    assert shown[4].split() == ["batch", "context", "measured"]
    assert shown[5].split(maxsplit=4) == ["16", "2,000", "ttft", "ms", "250.00 (240.00 to 1,300.00)"]
    assert shown[6].split(maxsplit=2) == ["tpot", "ms", "7.000 (6.500 to 7.500)"]
    assert shown[7].split(maxsplit=1) == ["tok/s", "4,000.0 (3,900.0 to 4,100.0)"]
    assert shown[8:] == ["", "note: no profile"]


def test_before_beside_after():
    before = side(measured(Row(1, 2000), 70.0), left_out=(LeftOut(Row(9, 9), "too long"),))
    after = side(measured(Row(1, 2000), 7.0), left_out=(LeftOut(Row(9, 9), "too long"), LeftOut(Row(8, 8), "in turns")))
    bench = ServerBench(
        "python -m x", "http://host:1", before, after, "/x/sglang", "kernel", gains=gains(before, after)
    )
    shown = lines(bench)
    assert shown[3] == "after: strategy kernel in /x/sglang"
    assert shown[5].split() == ["batch", "context", "before", "after", "gain"]
    assert shown[7].split(")")[0].endswith("70.00 (69.50 to 70.50")
    assert shown[7].split(")")[1].strip() == "7.000 (6.500 to 7.500"
    assert shown[7].endswith("10 x")
    assert shown[8].endswith("1 x")
    assert [line.split(maxsplit=2)[2] for line in shown[9:]] == [
        "left out: too long",
        "left out after the fix: in turns",
    ]


def test_a_row_that_only_one_side_has():
    bench = ServerBench("x", "u", side(measured(Row(1, 2000), 70.0)), side(measured(Row(2, 10), 7.0)))
    shown = lines(bench)
    assert [line.split()[:2] for line in (shown[5], shown[8])] == [["1", "2,000"], ["2", "10"]]
    assert not any(line.endswith(" x") for line in shown)
    assert shown[9].index("7.000") > shown[6].index("70.00")


def test_what_the_servers_say_stands_beside_what_one_repeats():
    row = side(measured(Row(1, 2000), 70.0))
    bench = ServerBench("x", "u", row, row)
    bench.repeatability = [Agreement(Stage.DECODE, 512, 0.99988, 0.9975, 0.174, 0.0122, 0.97265625)]
    bench.agreement = [
        Agreement(Stage.DECODE, 512, 0.99964, 0.9986, 0.15, 0.021, 0.94921875),
        Agreement(Stage.PREFILL, 512, 1.0, 1.0, 0.0, 0.0, 1.0),
    ]
    table = [line.split() for line in lines(bench) if "teacher-forced" in line or "before, a" in line]
    assert table == [
        ["logits,", "teacher-forced", "tokens", "cosine", "worst", "rms", "largest", "top-1"],
        ["DECODE", "before,", "again", "512", "0.99988", "0.99750", "0.0122", "0.1740", "97.3%"],
        ["DECODE", "before,", "after", "512", "0.99964", "0.99860", "0.0210", "0.1500", "94.9%"],
        ["PREFILL", "before,", "after", "512", "1.00000", "1.00000", "0.0000", "0.0000", "100.0%"],
    ]
