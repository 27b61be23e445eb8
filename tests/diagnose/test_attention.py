"""Which kernels are attention, by the names that libraries give them."""

from __future__ import annotations

import pytest

from mla_diag.diagnose.attention import is_attention


@pytest.mark.parametrize(
    "name",
    [
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<flashinfer::Traits<2u> >()",
        "_fwd_grouped_kernel_stage1",
        "mla_fp8_attention",
        "mla_fp8_sm90_attention",
    ],
)
def test_attention(name: str):
    assert is_attention(name)


@pytest.mark.parametrize(
    "name", ["mla_fp8_combine", "mla_fp8_sm90_combine", "mla_fp8_plan", "set_mla_kv_buffer_kernel"]
)
def test_what_goes_with_attention_is_not_it(name: str):
    assert not is_attention(name)
