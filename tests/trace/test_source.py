from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path

import pytest

from mla_diag.errors import UnreadableInputError
from mla_diag.trace import source
from mla_diag.trace.source import TraceBytes

# Text that deflate cannot shrink much, so that there is a middle to damage.
TEXT = b"".join(b"%d " % (number * 2654435761 % 2**32) for number in range(60_000))


def bytes_of(path: Path) -> tuple[bytes, str | None]:
    source_of = TraceBytes(path)
    return b"".join(source_of), source_of.damage


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "trace.json"  # the name says nothing: what the file holds decides
    path.write_bytes(data)
    return path


def test_plain_and_gzip_give_the_same_text(tmp_path):
    assert bytes_of(written(tmp_path, TEXT)) == (TEXT, None)
    assert bytes_of(written(tmp_path, gzip.compress(TEXT))) == (TEXT, None)


@pytest.mark.parametrize("read_size", [3, 7, 64, 1000, 256 * 1024])
def test_all_members_of_a_gzip_file_are_read_wherever_reads_end(tmp_path, monkeypatch, read_size):
    monkeypatch.setattr(source, "_READ_BYTES", read_size)
    members = gzip.compress(b"first ") + gzip.compress(b"") + b"\0" * 5 + gzip.compress(b"second") + b"\0" * 512
    assert bytes_of(written(tmp_path, members)) == (b"first second", None)


def test_what_follows_the_last_gzip_member_and_is_none_is_left_alone(tmp_path):
    assert bytes_of(written(tmp_path, gzip.compress(TEXT) + b"signature")) == (TEXT, None)


@pytest.mark.parametrize("kept", [10, 11, 18, 1000, -9, -8, -1])
def test_a_gzip_file_that_is_cut_off_says_where(tmp_path, kept):
    """chakra#192: EOFError from Python's gzip."""
    whole = gzip.compress(TEXT)
    text, damage = bytes_of(written(tmp_path, whole[:kept]))
    assert TEXT.startswith(text)
    assert damage == f"the gzip data stops at byte {len(whole[:kept]):,} without its end marker"
    if kept in (-8, -1):  # only the checksum is missing
        assert text == TEXT


def test_text_before_the_damage_in_a_gzip_file_is_salvaged(tmp_path):
    whole = bytearray(gzip.compress(TEXT))
    middle = len(whole) // 2
    whole[middle : middle + 64] = b"\xff" * 64
    text, damage = bytes_of(written(tmp_path, bytes(whole)))
    assert damage is not None
    assert "damaged" in damage
    undamaged = len(TEXT) * 45 // 100
    assert text[:undamaged] == TEXT[:undamaged]


def test_a_wrong_checksum_costs_no_text(tmp_path):
    whole = bytearray(gzip.compress(TEXT))
    whole[-6] ^= 0xFF
    text, damage = bytes_of(written(tmp_path, bytes(whole)))
    assert len(TEXT) - len(text) < 64 * 10
    assert TEXT.startswith(text)
    assert "checksum" in (damage or "")


def test_a_damaged_second_member_keeps_the_first(tmp_path):
    text, damage = bytes_of(written(tmp_path, gzip.compress(TEXT) + gzip.compress(TEXT)[:10] + b"\xff" * 99))
    assert text == TEXT
    assert damage is not None


@pytest.mark.parametrize("make", ["missing", "directory", "empty", "/dev/null", "file as directory", "name too long"])
def test_what_cannot_be_read_is_one_clear_line(tmp_path, make):
    path = {
        "missing": tmp_path / "missing.json",
        "directory": tmp_path,
        "empty": written(tmp_path, b""),
        "/dev/null": Path(os.devnull),
        "file as directory": written(tmp_path, b"") / "trace.json",
        "name too long": tmp_path / ("x" * 300),
    }[make]
    with pytest.raises(UnreadableInputError) as raised:
        bytes_of(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert "None" not in str(raised.value)


def test_a_file_without_permission_is_one_clear_line(tmp_path):
    path = written(tmp_path, TEXT)
    tmp_path.chmod(0o755)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read anything
    try:
        with pytest.raises(UnreadableInputError, match="denied; check the path"):
            bytes_of(path)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("data", [TEXT, gzip.compress(TEXT)], ids=["plain", "gzip"])
def test_a_pipe_is_read_to_its_end(tmp_path, data):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(data,))
    writer.start()
    assert bytes_of(path) == (TEXT, None)
    writer.join()


def test_a_file_that_grows_while_it_is_read_gives_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_TEXT_BYTES", 1000)
    path = written(tmp_path, TEXT)
    blocks = []
    with path.open("ab") as file:
        for block in TraceBytes(path):
            blocks.append(block)
            if len(blocks) == 3:
                file.write(b"more")
                file.flush()
    assert b"".join(blocks) == TEXT + b"more"


def test_the_thread_ends_when_its_consumer_leaves_early(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_TEXT_BYTES", 100)
    before = threading.active_count()
    blocks = iter(TraceBytes(written(tmp_path, TEXT)))
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_progress_goes_from_the_first_byte_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_READ_BYTES", 5000)
    path = written(tmp_path, gzip.compress(TEXT))
    seen: list[tuple[int, int]] = []
    b"".join(TraceBytes(path, lambda done, total: seen.append((done, total))))
    size = path.stat().st_size
    assert seen == [(min(done, size), size) for done in range(5000, size + 5000, 5000)]
