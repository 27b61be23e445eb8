from __future__ import annotations

from mla_diag.diagnose.words import count


def test_a_number_of_things():
    assert [count(number, "step") for number in (0, 1, 2, 12_000)] == ["0 steps", "1 step", "2 steps", "12,000 steps"]
