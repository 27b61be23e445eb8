"""Kernel names as an engineer would say them."""

from __future__ import annotations

import pytest

from mla_diag.diagnose.kernel_names import short_kernel_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("_fwd_grouped_kernel_stage1", "_fwd_grouped_kernel_stage1"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
            "::{lambda()#3}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, 4>(int)",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
            "at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>(int)>(int, int)",
            "elementwise_kernel<float8_copy_kernel_cuda>",
        ),
        (
            "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<flashinfer::Traits<2u> >()",
            "BatchMLAPageAttentionHopperKernel",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<Mainloop<1> > > >()",
            "device_kernel<FlashAttnFwdSm90>",
        ),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(cublasGemvParams)", "gemvx::kernel"),
        (
            "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
            "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, int)",
            "fused_add_rms_norm_kernel",
        ),
        ("void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16, true>(int)", "act_and_mul_kernel"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256EEEvPT_", "add_rmsnorm_quant_kernel"),
        (
            "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernelINS_1xEEEJEEEvDpT1_",
            "kentry<FmhaBatchPrefillWithPagedKVCacheKernel>",
        ),
        ("_Z6kernelv", "kernel"),
        ("_Z", "_Z"),
        ("<", "<"),
        ("", ""),
    ],
)
def test_short_kernel_name(name: str, short: str):
    assert short_kernel_name(name) == short
