"""straggler-rank: the rank whose own work is longer, while the others wait in their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mla_diag.diagnose.diagnosis import Diagnosis, Finding
from mla_diag.diagnose.explain import explain
from mla_diag.diagnose.rules import straggler_rank
from tests.diagnose.rules.finding import ALL_REDUCE, GEMM, steps
from tests.trace_builder import TraceBuilder

ATTENTION = "BatchMLAPageAttentionHopperKernel"


def work(builder: TraceBuilder, start: float, attention: float, waited: float) -> None:
    """One step's kernels."""
    at = start + 100
    for name, duration in ((GEMM, 1_000), (ATTENTION, attention), (ALL_REDUCE, waited)):
        if duration:
            builder.kernel(name, at, duration, builder.launch(at - 50, 2))
        at += duration


# A rank by its number, or by its name and the requests of its steps.
Rank = int | tuple[str, int] | None


def job(path: Path, ranks: Sequence[tuple[Rank, float, float]]) -> Diagnosis:
    """Ranks given with the microseconds a step of attention and all-reduce that they take, beside 1 ms of GEMM."""
    paths = []
    for place, (rank, attention, waited) in enumerate(ranks):
        name, batch = rank if isinstance(rank, tuple) else (f"{place}", 1)

        def fill(builder: TraceBuilder, start: float, attention: float = attention, waited: float = waited) -> None:
            work(builder, start, attention, waited)

        builder = TraceBuilder(rank=None if isinstance(rank, tuple) else rank)
        paths.append(steps(fill, builder=builder, name=f"step[DECODE bs={batch}]").write(path / f"{name}.json"))
    return explain(paths)


def found(path: Path, *ranks: tuple[Rank, float, float]) -> list[Finding]:
    diagnosis = job(path, ranks)
    return list(straggler_rank.find(diagnosis.stages, diagnosis.traces))


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


SLOW, FAST = (1_000, 200), (500, 700)


def test_tp_ranks_are_compared_within_their_replica(tmp_path: Path):
    """Replicas share no collective: what one does, another does not wait for."""
    first = [(("TP-0-DP-0", 8), *SLOW), (("TP-1-DP-0", 8), *SLOW)]
    second = [(("TP-0-DP-1", 8), *FAST), (("TP-1-DP-1", 8), *FAST)]
    assert not found(tmp_path, *first, *second)
    (finding,) = found(tmp_path, *first, second[0], (("TP-1-DP-1", 8), *SLOW))
    assert finding.title.startswith("rank TP-1 DP-1 works 0.50 ms a step longer than rank TP-0 DP-1 ")
    assert (finding.evidence["ranks"], finding.evidence["data_parallel_groups"]) == (2, 1)
    assert finding.confidence == "high"


def test_groups_of_dp_attention_are_compared_where_their_batches_are_the_same(tmp_path: Path):
    """They wait for each other in the experts' layers, but a larger batch is load and no straggler."""
    (path := tmp_path / "differ").mkdir()
    assert not found(path, (("TP-0-DP-0", 8), *FAST), (("TP-1-DP-1", 64), *SLOW), (("TP-2-DP-2", 16), *FAST))
    (path := tmp_path / "same").mkdir()
    ranks = [(("TP-0-DP-0", 8), *FAST), (("TP-1-DP-1", 8), *SLOW), (("TP-2-DP-2", 8), *FAST)]
    (finding,) = found(path, *ranks, (("TP-3-DP-3", 64), 2_000, 0))
    assert finding.title.startswith("rank TP-1 DP-1 works 0.50 ms a step longer than the other 2 ranks usually do")
    assert (finding.evidence["ranks"], finding.evidence["data_parallel_groups"]) == (3, 3)
    assert finding.confidence == "medium"  # contexts may differ where batches do not


def test_a_straggler_within_a_group_of_dp_attention(tmp_path: Path):
    ranks = [(("TP-0-DP-0", 8), *FAST), (("TP-1-DP-0", 8), *SLOW), (("TP-2-DP-1", 64), 3_000, 50)]
    (finding,) = found(tmp_path, *ranks, (("TP-3-DP-1", 64), 3_000, 50))
    assert finding.title.startswith("rank TP-1 DP-0 works 0.50 ms a step longer than rank TP-0 DP-0 ")
    assert finding.evidence["data_parallel_groups"] == 1


def test_pipeline_stages_are_not_compared(tmp_path: Path):
    """They have different layers, and the last has the head."""
    assert not found(tmp_path, (("TP-0-PP-0", 8), *FAST), (("TP-0-PP-1", 8), *SLOW))


def test_ranks_of_a_merged_trace_are_compared(tmp_path: Path):
    """Labels such as TP00-DP01 gave the TP rank alone, which replicas share, and the rule stayed silent."""
    whole = TraceBuilder()
    for label, attention, waited in (("TP00-DP00", *FAST), ("TP00-DP01", *FAST), ("TP01-DP00", *SLOW)):
        part = steps(lambda builder, start, a=attention, w=waited: work(builder, start, a, w))
        whole.events += [{**event, "pid": f"[{label}] {event['pid']}"} for event in part.events]
    diagnosis = explain(whole.write(tmp_path / "merged-17.trace.json.gz"))
    assert [trace.rank_name for trace in diagnosis.traces] == ["TP-0 DP-0", "TP-0 DP-1", "TP-1 DP-0"]
    (finding,) = [finding for finding in diagnosis.findings if finding.kind == straggler_rank.KIND]
    assert finding.title.startswith("rank TP-1 DP-0 works 0.50 ms a step longer than rank TP-0 DP-0 ")


def test_two_ranks_of_a_real_job(shared_traces: Path):
    paths = [shared_traces / "public" / f"hta-sampled-rank-{rank}.json.gz" for rank in (0, 1)]
    (finding,) = [finding for finding in explain(paths).findings if finding.kind == straggler_rank.KIND]
    assert finding.rank == 1
    assert finding.evidence["excess_ms_per_step"] == pytest.approx(38.42, abs=0.01)
    assert finding.cost_ms_per_step == pytest.approx(8.57, abs=0.01)
    assert finding.confidence == "low"


def test_recordings_of_different_servers_are_no_ranks_of_one(recordings: Path):
    paths = [recordings / f"{name}-graph-decode.trace.json.gz" for name in ("bf16kv", "native")]
    assert not [finding for finding in explain(paths).findings if finding.kind == straggler_rank.KIND]
