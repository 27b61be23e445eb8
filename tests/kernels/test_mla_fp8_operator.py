"""Whichever kernel is the device's: the same answers, and never a build inside a capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from mla_problems import problem  # noqa: E402

from mla_diag.kernels import mla_fp8_operator  # noqa: E402
from mla_diag.kernels.mla_fp8_operator import attend, prepare, schedule  # noqa: E402


def test_a_schedule_serves_the_calls_it_was_made_for(device: str) -> None:
    case = problem(16, [7, 0, 33], device=device)
    made = schedule(16, kv_indptr=case.addressing["kv_indptr"])
    case.check(operator=attend, schedule=made)


def test_extend_over_a_page_table(device: str) -> None:
    problem(3, [9, 20], query_lens=[2, 4], page_size=4, device=device).check(operator=attend)


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that says it has a Hopper card, none of which has been looked at."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(mla_fp8_operator, "_refusals", {})
    mla_fp8_operator._is_hopper.cache_clear()
    yield
    mla_fp8_operator._is_hopper.cache_clear()


@pytest.mark.usefixtures("_hopper")
def test_nothing_is_built_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(mla_fp8_operator, "unavailable", built.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card = torch.device("cuda:0")
    assert "before a CUDA graph was captured" in str(prepare(card))
    assert built == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert prepare(card) is None
    assert prepare(card) is None
    assert built == [card]


@pytest.mark.usefixtures("_hopper")
def test_a_build_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(device: torch.device) -> str:
        tried.append(device)
        return "neither NVRTC nor nvcc"

    monkeypatch.setattr(mla_fp8_operator, "unavailable", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        assert prepare(torch.device("cuda:0")) == "neither NVRTC nor nvcc"
    assert len(tried) == 1


def test_another_device_has_nothing_to_prepare() -> None:
    assert prepare(torch.device("cpu")) is None
