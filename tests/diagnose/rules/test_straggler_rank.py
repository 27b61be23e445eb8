"""straggler-rank: the rank whose own work is longer, while the others wait in their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mla_diag.diagnose.diagnosis import Finding, StageReport
from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.rules import straggler_rank
from tests.diagnose.rules.finding import ALL_REDUCE, GEMM, steps
from tests.trace_builder import TraceBuilder

ATTENTION = "BatchMLAPageAttentionHopperKernel"


def reports(path: Path, ranks: Sequence[tuple[int | None, float, float]]) -> list[StageReport]:
    """The stages of ranks given by number and microseconds a step of attention and all-reduce, beside 1 ms of GEMM."""
    paths = []
    for place, (rank, attention, waited) in enumerate(ranks):

        def fill(builder: TraceBuilder, start: float, attention: float = attention, waited: float = waited) -> None:
            at = start + 100
            for name, duration in ((GEMM, 1_000), (ATTENTION, attention), (ALL_REDUCE, waited)):
                if duration:
                    builder.kernel(name, at, duration, builder.launch(at - 50, 2))
                at += duration

        paths.append(steps(fill, builder=TraceBuilder(rank=rank)).write(path / f"{place}.json"))
    return explain(paths).stages


def found(path: Path, *ranks: tuple[int | None, float, float]) -> list[Finding]:
    return list(straggler_rank.find(reports(path, ranks)))


def test_three_ranks_wait_for_the_fourth(tmp_path: Path):
    (finding,) = found(tmp_path, (0, 500, 700), (1, 500, 700), (2, 1_000, 200), (3, 510, 690))
    assert finding.rank == 2
    assert finding.evidence["ranks"] == 4
    assert finding.evidence["own_ms_per_step"] == pytest.approx(2.0)
    assert finding.evidence["own_ms_per_step_of_others"] == pytest.approx(1.5)
    assert finding.evidence["kernel"] == ATTENTION
    assert finding.evidence["kernel_excess_ms_per_step"] == pytest.approx(0.5)
    assert finding.cost_ms_per_step == pytest.approx(0.5)
    assert finding.share == pytest.approx(0.5 / 2.2)
    assert finding.confidence == "high"


@pytest.mark.parametrize(("attention", "count"), [(580, 1), (560, 0)])
def test_a_twentieth_more_work(tmp_path: Path, attention: float, count: int):
    """1.58 ms are 5.3 % more than 1.5, 1.56 are 4 %."""
    assert len(found(tmp_path, (0, 500, 700), (1, attention, 600))) == count


def test_what_the_others_do_not_wait_for_costs_them_nothing(tmp_path: Path):
    assert not found(tmp_path, (0, 500, 200), (1, 1_000, 200))
    (finding,) = found(tmp_path, (0, 500, 300), (1, 1_000, 200))
    assert finding.evidence["excess_ms_per_step"] == pytest.approx(0.5)
    assert finding.cost_ms_per_step == pytest.approx(0.1)
    assert finding.confidence == "low"


def test_traces_of_one_rank_or_of_none_are_not_compared(tmp_path: Path):
    """Two servers' traces of rank 0 are no job of two ranks, and a trace that says no rank could be of any."""
    assert not found(tmp_path, (0, 500, 700), (0, 1_000, 200))
    assert not found(tmp_path, (None, 500, 700), (1, 1_000, 200))
    assert not found(tmp_path, (1, 1_000, 200))


def test_two_ranks_of_a_real_job(shared_traces: Path):
    paths = [shared_traces / "public" / f"hta-sampled-rank-{rank}.json.gz" for rank in (0, 1)]
    (finding,) = straggler_rank.find(explain(paths).stages)
    assert finding.rank == 1
    assert finding.evidence["excess_ms_per_step"] == pytest.approx(38.42, abs=0.01)
    assert finding.cost_ms_per_step == pytest.approx(8.57, abs=0.01)
    assert finding.confidence == "low"


def test_recordings_of_different_servers_are_no_ranks_of_one(recordings: Path):
    paths = [recordings / f"{name}-graph-decode.trace.json.gz" for name in ("bf16kv", "native")]
    assert not list(straggler_rank.find(explain(paths).stages))
