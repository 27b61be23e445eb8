"""Where a server writes its traces, what their names tell, and whether they are whole."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from mla_diag.diagnose.server_info import parse_server_info
from mla_diag.errors import UsageError
from mla_diag.server import trace_files
from mla_diag.server.trace_files import (
    TraceDirectory,
    expected_ranks,
    locate,
    rank_and_stage,
    rank_notes,
)
from mla_diag.trace.rank import Coordinates


@pytest.mark.parametrize(
    ("name", "rank", "stage"),
    [
        ("1795971432.2475967-TP-0-DECODE.trace.json.gz", Coordinates(0), "decode"),
        ("mla-1795971432.24-TP-3-DP-1-PP-2-EP-3-EXTEND.trace.json.gz", Coordinates(3, 1, 2, 3), "prefill"),
        ("1795971432.2475967-TP-11.trace.json.gz", Coordinates(11), None),
        ("1795971432.2475967-TP-0-prefill.trace.json.gz", Coordinates(0), "prefill"),
    ],
)
def test_ranks_and_stage_by_the_name(name: str, rank: Coordinates, stage: str | None):
    assert rank_and_stage(name) == (rank, stage)


@pytest.mark.parametrize("name", ["merged-1.trace.json.gz", "1-TP-0-memory.pickle", "1-TP-0-DECODE.trace.json.gz.tmp"])
def test_files_of_another_kind(name: str):
    assert rank_and_stage(name) is None


@pytest.mark.parametrize(
    ("answer", "ranks"),
    [
        ({}, [Coordinates(0)]),
        ({"tp_size": 2}, [Coordinates(0), Coordinates(1)]),
        ({"dp_size": 2}, [Coordinates(0, dp=0), Coordinates(0, dp=1)]),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, [Coordinates(0, dp=0), Coordinates(1, dp=1)]),
        ({"pp_size": 2}, [Coordinates(0, pp=0), Coordinates(0, pp=1)]),
        ({"tp_size": 4, "ep_size": 2}, [Coordinates(tp, ep=ep) for tp, ep in ((0, 0), (1, 0), (2, 1), (3, 1))]),
    ],
)
def test_every_rank_that_writes_a_trace(answer: dict[str, Any], ranks: list[Coordinates]):
    assert expected_ranks(parse_server_info(answer)) == ranks


def test_missing_ranks_are_named_by_stage():
    server = parse_server_info({"tp_size": 2})
    names = ["1-TP-0-EXTEND.trace.json.gz", "1-TP-1-EXTEND.trace.json.gz", "1-TP-0-DECODE.trace.json.gz"]
    assert rank_notes(names, server) == ["no decode trace of TP-1 (1 of 2 ranks)"]
    assert rank_notes([*names, "1-TP-1-DECODE.trace.json.gz"], server) == []


def test_a_missing_rank_of_a_server_with_experts_is_named_with_its_experts():
    server = parse_server_info({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2})
    (note,) = rank_notes(["1-TP-0-DP-0-EP-0-DECODE.trace.json.gz"], server)
    assert note == "no decode trace of TP-1 DP-1 EP-1 (1 of 2 ranks)"
    # Releases that name files by the TP rank alone say no less: there is one of each.
    assert rank_notes(["1-TP-0.trace.json.gz", "1-TP-1.trace.json.gz"], parse_server_info({"tp_size": 2})) == []


def test_colliding_ranks_are_named():
    names = ["1-TP-0-DECODE.trace.json.gz", "2-TP-0-DECODE.trace.json.gz"]
    (note,) = rank_notes(names, parse_server_info({}))
    assert "1-TP-0-DECODE.trace.json.gz and 2-TP-0-DECODE.trace.json.gz are of the same rank and stage" in note


def test_replicas_that_overwrite_each_other_and_other_nodes_are_explained():
    name = ["1-TP-0-DECODE.trace.json.gz"]
    assert "overwrite" in rank_notes(name, parse_server_info({"dp_size": 2}))[0]
    assert "overwrite" in rank_notes(name, parse_server_info({"pp_size": 2}))[0]
    missing_one = rank_notes(name, parse_server_info({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}))[0]
    assert "overwrite" not in missing_one  # each has a TP rank of its own
    assert "own disks" in rank_notes(name, parse_server_info({"tp_size": 16, "nnodes": 2}))[0]


@pytest.mark.parametrize(
    ("root", "local", "on_server", "here"),
    [
        (None, True, "/tmp/x", "/tmp/x"),
        (None, False, "/tmp/x", None),
        ("/mnt/shared/", False, "/mnt/shared/x", "/mnt/shared/x"),
        ("sftp://gpu1/var/traces", False, "/var/traces/x", "sftp://gpu1/var/traces/x"),
        ("/traces=/mnt/pod/traces", True, "/traces/x", "/mnt/pod/traces/x"),
        ("/mnt/bucket=s3://bucket/prefix", False, "/mnt/bucket/x", "s3://bucket/prefix/x"),
    ],
)
def test_where_the_server_writes_and_where_that_is_read(
    root: str | None, local: bool, on_server: str, here: str | None
):
    assert locate(root, local=local, name="x") == TraceDirectory(on_server, here)


def test_a_place_that_is_not_absolute_is_one_line():
    with pytest.raises(UsageError, match=r"--trace-root traces: .*absolute"):
        locate("traces", local=True, name="x")


def test_a_place_that_is_not_absolute_is_said_without_its_password():
    with pytest.raises(UsageError, match=r"--trace-root sftp://me:\*\*\*@host: "):
        locate("sftp://me:hunter2@host", local=False, name="x")


@pytest.mark.parametrize("stacks", [False, True])
def test_a_disk_without_room_is_refused_because_the_server_would_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacks: bool
):
    """SGLang exports on its scheduler's thread; no space left there ends the server (measured on 0.5.17)."""
    monkeypatch.setattr(trace_files, "_ROOM_WITH_STACKS" if stacks else "_ROOM", 1 << 60)
    directory = TraceDirectory(str(tmp_path / "x"), str(tmp_path / "x"))
    with pytest.raises(UsageError, match="MB free"):
        directory.prepare(stacks)
    assert not (tmp_path / "x").exists()
    directory.prepare(not stacks)
    assert (tmp_path / "x").is_dir()


def test_a_place_that_is_not_there_is_one_line(tmp_path: Path):
    missing = str(tmp_path / "missing" / "x")
    with pytest.raises(UsageError, match="no such directory"):
        TraceDirectory(missing, missing).prepare(False)


def test_a_trace_that_is_still_being_written_is_not_whole(tmp_path: Path):
    whole = gzip.compress(b'{"traceEvents": []}' * 1000)
    directory = TraceDirectory("/server", str(tmp_path))
    file = tmp_path / "1-TP-0.trace.json.gz"
    for part in (b"", whole[:10], whole[:-4]):
        file.write_bytes(part)
        assert not directory.is_complete(file.name)
    file.write_bytes(whole)
    assert directory.is_complete(file.name)


@pytest.mark.parametrize("url", [False, True])
def test_traces_are_copied_from_a_path_and_from_a_url(tmp_path: Path, url: bool):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "1-TP-0.trace.json.gz").write_bytes(b"content")
    (there / "other.txt").write_text("not a trace")
    directory = TraceDirectory("/server", there.as_uri() if url else str(there))
    assert directory.sizes() == {"1-TP-0.trace.json.gz": 7}
    assert directory.fetch("1-TP-0.trace.json.gz", here).read_bytes() == b"content"


def test_a_url_that_cannot_be_read_is_one_line():
    with pytest.raises(UsageError, match=r"^--trace-root nosuch://host/x: cannot be reached .*scheme"):
        TraceDirectory("/x", "nosuch://host/x").sizes()
    assert TraceDirectory("/x", "file:///nonexistent/x").sizes() == {}


def test_a_copy_that_does_not_fit_is_one_line_and_leaves_no_part_of_it(tmp_path: Path):
    (tmp_path / "1-TP-0.trace.json.gz").write_bytes(b"content")
    directory = TraceDirectory("/server", str(tmp_path))
    with pytest.raises(UsageError, match="cannot be copied"):
        directory.fetch("1-TP-0.trace.json.gz", tmp_path / "missing")


def test_what_was_copied_is_removed_and_nothing_else(tmp_path: Path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "1-TP-0.trace.json.gz").write_bytes(b"content")
    (folder / "theirs.txt").write_text("kept")
    TraceDirectory("/server", str(folder)).remove()
    assert [file.name for file in folder.iterdir()] == ["theirs.txt"]
