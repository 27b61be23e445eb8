"""What a file must look like to be rewritten, and what stops it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_diag.fix.sites import BackendFile, Kind, read_backend
from tests.fix.conftest import CSR, DATA, PAGE_TABLE

CSR_TEXT = (DATA / Path(CSR).name).read_text()
PAGE_TABLE_TEXT = (DATA / Path(PAGE_TABLE).name).read_text()


def read(text: str, path: str = CSR) -> BackendFile:
    return read_backend(Path("sglang") / path, text.encode())


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def test_sites_of_the_csr_backend() -> None:
    file = read(CSR_TEXT)
    lines = CSR_TEXT.splitlines()
    assert [(site.function, site.pool, site.kind, site.wrapper) for site in file.sites] == [
        ("FlashInferMLAAttnBackend.forward_extend", "dcp_kv_buffer", Kind.CSR, "prefill_wrapper_paged"),
        ("FlashInferMLAAttnBackend.forward_extend", "get_key_buffer", Kind.CSR, "prefill_wrapper_paged"),
        ("FlashInferMLAAttnBackend.forward_decode", "get_key_buffer", Kind.CSR, "decode_wrapper"),
    ]
    assert all(site.pool in lines[site.line - 1] for site in file.sites)
    assert [plan.planner for plan in file.plans] == [None, None, "fast_mla_decode_plan", None]
    assert (file.problem, file.needed, file.patched) == (None, True, False)


def test_sites_of_the_page_table_backend() -> None:
    file = read(PAGE_TABLE_TEXT, PAGE_TABLE)
    assert [(site.function, site.kind) for site in file.sites] == [
        ("FlashAttentionBackend.forward_extend", Kind.PAGE_TABLE),
        ("FlashAttentionBackend.forward_decode", Kind.PAGE_TABLE),
    ]
    assert file.problem is None


UNDERSTOOD = {
    "a renamed local": ("k_buffer", "latent_pool"),
    "other formatting": ("k_buf = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)",
                         "k_buf = (\n                self.token_to_kv_pool\n                # all of it\n"
                         "                .get_key_buffer(layer.layer_id)\n                .to(dtype=q.dtype))"),
    "the cast on a line of its own": ("k_buf = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)",
                                      "raw = self.token_to_kv_pool.get_key_buffer(layer.layer_id)\n"
                                      "            k_buf = raw.to(q.dtype)"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
def test_file_written_differently_is_understood(old: str, new: str) -> None:
    file = read(changed(CSR_TEXT, old, new))
    assert len(file.sites) == 3
    assert file.problem is None


def test_reordered_methods_are_understood() -> None:
    start, decode, updater = (
        CSR_TEXT.index(text)
        for text in ("    def forward_extend", "    def forward_decode", "class FlashInferMLAIndicesUpdaterD")
    )
    reordered = CSR_TEXT[:start] + CSR_TEXT[decode:updater] + CSR_TEXT[start:decode] + "\n\n" + CSR_TEXT[updater:]
    file = read(reordered)
    assert [site.function.rpartition(".")[2] for site in file.sites] == [
        "forward_decode",
        "forward_extend",
        "forward_extend",
    ]
    assert file.problem is None


EXTEND_CAST = "k_buf = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)"
EXTEND_END = "        return o.view(-1"
DTYPES = "        self.data_type = model_runner.dtype\n        self.q_data_type"
BOUND = "        prefill_wrapper_paged = self.forward_metadata.prefill_wrapper\n"
REFUSED = {
    "another consumer": (
        EXTEND_END,
        f"        probe(k_buf)\n{EXTEND_END}",
        "probe() is given the pool and is not known",
    ),
    "the pool kept": (EXTEND_END, f"        self.kept = k_buf\n{EXTEND_END}", "the pool leaves the function"),
    "another cast": (EXTEND_CAST, EXTEND_CAST.replace("to(q.dtype)", "half()"), "other than .to(dtype)"),
    "a cast with more": (EXTEND_CAST, EXTEND_CAST.replace("q.dtype", "q.dtype, copy=True"), "other than .to(dtype)"),
    "a KV dtype kept already": (DTYPES, f"        self.kv_data_type = None\n{DTYPES}", "keeps a KV dtype already"),
    "another KV dtype": ("kv_data_type=self.data_type", "kv_data_type=torch.float8_e4m3fn", "not the model's own"),
    "a wrapper bound later": (BOUND, "", "is not bound before the cast"),
    "an unknown run": ("k_buf[:, :, : layer.v_head_dim],", "*split(k_buf),", "is given the pool and is not known"),
    "two wrappers": (EXTEND_END, f"        other.run(q, q, k_buf, k_buf)\n{EXTEND_END}", "on several wrappers"),
}


@pytest.mark.parametrize(("old", "new", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_file_that_is_not_understood_says_why_and_where(old: str, new: str, why: str) -> None:
    file = read(changed(CSR_TEXT, old, new))
    assert file.needed
    assert file.problem is not None
    line, _, reason = file.problem.partition(": ")
    assert why in reason
    assert int(line) <= len(CSR_TEXT.splitlines()) + 2


def test_half_changed_file_is_refused() -> None:
    cast = "k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)"
    file = read(changed(CSR_TEXT, cast, cast.removesuffix(".to(q.dtype)")))
    assert file.problem is not None
    assert "half changed" in file.problem


def test_plans_elsewhere_are_refused() -> None:
    text = changed(CSR_TEXT, "wrapper.plan(", "wrapper.prepare(").replace(
        "wrapper_paged.plan(", "wrapper_paged.prepare("
    )
    file = read(
        text.replace("fast_mla_decode_plan(\n                wrapper_paged", "prepare(\n                wrapper_paged")
    )
    assert file.problem is not None
    assert "planned elsewhere" in file.problem


def test_backend_of_other_hardware_is_left_alone_and_not_needed() -> None:
    for path in (
        "srt/hardware_backend/musa/attention/flashattention_backend.py",
        "srt/layers/attention/xpu_backend.py",
    ):
        file = read(PAGE_TABLE_TEXT, path)
        assert file.sites
        assert not file.needed
        assert "other hardware" in (file.problem or "")


def test_where_sglang_is_installed_says_nothing_about_hardware() -> None:
    file = read_backend(Path("/home/hip/npu/sglang") / CSR, CSR_TEXT.encode())
    assert file.problem is None


def test_file_without_casts_has_nothing_to_fix() -> None:
    file = read(changed(PAGE_TABLE_TEXT, ".to(q.dtype)", ""), PAGE_TABLE)
    assert not file.sites
    assert file.problem is None


@pytest.mark.parametrize("content", [b"def broken(:\n", b"# \xff\n"], ids=["syntax", "encoding"])
def test_unreadable_file_is_an_error_of_one_line(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^backend\.py: not readable as Python: [^\n]+$"):
        read_backend(Path("backend.py"), content)
