"""Releases sort as they came out."""

from __future__ import annotations

import itertools

import pytest

from mla_diag.server.releases import default_backend, is_older

IN_ORDER = [
    "0.4.6",
    "0.4.6.post4",
    "0.4.6.post5",
    "0.4.8",
    "0.4.8.post1",
    "0.4.9.post2",
    "0.5.1",
    "0.5.10",
    "0.5.23",
    "1.0",
]


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(IN_ORDER)))
def test_order(first: str, second: str):
    assert is_older(first, second)
    assert not is_older(second, first)
    assert not is_older(first, first)


def test_candidates_and_builds_count_as_their_release():
    assert not is_older("0.5.2rc1", "0.5.2")
    assert not is_older("v0.5.2.dev123+gabc", "0.5.2")


@pytest.mark.parametrize("version", [None, "", "0.0.0.dev0", "0.0.0.dev1+g2f1a9c3", "main", "unknown"])
def test_an_unknown_release_is_taken_for_a_new_one(version: str | None):
    assert not is_older(version, "0.4.6")
    assert is_older("0.5.23", version)


@pytest.mark.parametrize(
    ("card", "backend"),
    [
        ("NVIDIA H100 80GB HBM3", "fa3"),
        ("NVIDIA H200", "fa3"),
        ("NVIDIA H20", "fa3"),
        ("NVIDIA GB200", "flashinfer"),
        ("NVIDIA B200", "flashinfer"),
        ("NVIDIA A100-SXM4-80GB", "triton"),
        (None, None),
    ],
)
def test_default_backend_of_a_card(card: str | None, backend: str | None):
    assert default_backend(card) == backend
