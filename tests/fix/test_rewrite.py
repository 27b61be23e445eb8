"""The rewritten file: every use of the pool routed, every plan given its dtype, all else as it was."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from mla_diag.fix.rewrite import rewrite
from mla_diag.fix.sites import is_routed, read_backend
from tests.fix.conftest import CSR, DATA, PAGE_TABLE

FILES = (CSR, PAGE_TABLE)


def rewritten(path: str, content: bytes) -> bytes:
    return rewrite(read_backend(Path("sglang") / path, content))


@pytest.fixture(params=FILES, ids=["csr", "page-table"])
def backend(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    return request.param, (DATA / Path(request.param).name).read_bytes()


def test_no_cast_remains_and_every_use_is_routed(backend: tuple[str, bytes]) -> None:
    path, content = backend
    file = read_backend(Path("sglang") / path, rewritten(path, content))
    assert not file.sites
    assert file.pool_calls
    assert all(is_routed(call) for call in file.pool_calls)
    assert all(is_routed(plan.call) for plan in file.plans)
    assert all(file.source.code(plan.kv_dtype.value) == "self.kv_data_type" for plan in file.plans)


def test_only_the_lines_of_the_fix_differ(backend: tuple[str, bytes]) -> None:
    path, content = backend
    before, after = content.decode().splitlines(), rewritten(path, content).decode().splitlines()
    removed = [line[2:].strip() for line in difflib.ndiff(before, after) if line.startswith("- ")]
    kinds = (
        "get_key_buffer",
        "dcp_kv_buffer.to",
        ".run(",
        ".plan(",
        "fast_mla_decode_plan(",
        "flash_attn_with_kvcache(",
    )
    others = [line for line in removed if not any(kind in line for kind in kinds)]
    assert set(others) <= {"self.data_type,", "kv_data_type=self.data_type,"}
    assert "# the rope part" not in content.decode() or b"# the rope part" in rewritten(path, content)


def test_five_coordinated_changes_of_the_csr_backend() -> None:
    text = rewritten(CSR, (DATA / Path(CSR).name).read_bytes()).decode()
    assert text.count("self.kv_data_type = model_runner.kv_cache_dtype") == 2
    assert text.count("mla_fp8_dispatch.plan(") == 4
    assert text.count("mla_fp8_dispatch.kv_for_wrapper(") == 3
    assert text.count("mla_fp8_dispatch.run(") == 2
    # A replay plans from host copies, so the kernel is told where the pointers are on the device.
    assert text.count("device_kv_indptr=kv_indptr,") == 2
    assert text.count("planner=fast_mla_decode_plan,") == 1
    assert "wrapper_ragged.begin_forward(qo_indptr=batch.q_indptr, q_data_type=self.q_data_type" in text


def test_line_endings_are_kept(backend: tuple[str, bytes]) -> None:
    path, content = backend
    windows = rewritten(path, content.replace(b"\n", b"\r\n"))
    assert windows == rewritten(path, content).replace(b"\n", b"\r\n")


def test_encoding_is_kept(backend: tuple[str, bytes]) -> None:
    path, content = backend
    latin = "# -*- coding: latin-1 -*-\n# é\n".encode("latin-1") + content
    assert rewritten(path, latin).startswith("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))


def test_import_goes_after_the_others_and_before_any_class(backend: tuple[str, bytes]) -> None:
    path, content = backend
    lines = rewritten(path, content).decode().splitlines()
    place = lines.index("from . import mla_fp8_dispatch")
    first_class = next(index for index, line in enumerate(lines) if line.startswith(("class ", "@dataclass")))
    imports = [index for index, line in enumerate(lines) if line.startswith(("import ", "from "))]
    assert place == max(imports)
    assert place < first_class


def test_file_that_is_not_understood_is_not_rewritten() -> None:
    content = (DATA / Path(CSR).name).read_bytes().replace(b"wrapper.plan(", b"wrapper.prepare(")
    content = content.replace(b"kv_data_type=self.data_type", b"kv_data_type=other")
    with pytest.raises(ValueError, match="only files that are understood"):
        rewritten(CSR, content)
