"""What releases of SGLang do to the pool and with the profiler, from the sources of those up to LAST_READ."""

from __future__ import annotations

import re

LAST_READ = "0.5.23"

# Backend of --attention-backend, the file of sglang/srt/layers/attention/ that casts the pool for it, the first release
# that does.
CASTS = {
    "flashinfer": ("flashinfer_mla_backend.py", "0.4.6.post5"),
    "fa3": ("flashattention_backend.py", "0.4.8.post1"),
    "fa4": ("flashattention_backend.py", "0.4.8.post1"),
    "intel_xpu": ("xpu_backend.py", "0.5.4"),
}
READS_FP8 = {"triton", "flashmla", "cutlass_mla", "trtllm_mla", "aiter", "dsa", "nsa", "wave"}
# These run MLA models only.
MLA_BACKENDS = {"flashmla", "cutlass_mla", "trtllm_mla"}
# As sglang/srt/configs/model_config.py lists them.
MLA_ARCHITECTURES = re.compile(
    r"Deepseek(?:V2|V3|V32)For|GlmMoeDsa|Glm4MoeLite|LongcatFlash|DotsVLM|KimiVL|KimiLinear|KimiK\d|MistralLarge3"
    r"|SarvamMLA|MiniCPM3"
)
# The first to profile from a given step on; before, such a start is a plain one, which ends another's profile.
START_STEP = "0.4.9.post2"
# From here on traces name their steps, as those of 0.5.5 do not, so that one file can hold both stages.
STEP_SPANS = "0.5.12"

_HOPPER = re.compile(r"\bH(?:20|100|200|800)\b")
_BLACKWELL = re.compile(r"\bG?B[123]00\b")


def release(version: str | None) -> tuple[int, ...] | None:
    """A release as numbers that sort: 0.4.6.post5 after 0.4.6; release candidates count as the release.

    None where it is not known: a checkout without tags calls itself 0.0.0.dev0.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?", version or "")
    numbers = tuple(int(part or 0) for part in found.groups()) if found else ()
    return numbers if any(numbers) else None


def is_older(version: str | None, than: str | None) -> bool:
    """Whether a release came before another; an unknown one is taken for a new one."""
    first, second = release(version), release(than)
    return first is not None and (second is None or first < second)


def default_backend(card: str | None) -> str | None:
    """What SGLang takes for an MLA model where nobody chose (`_get_default_attn_backend` in server_args.py)."""
    if card is None:
        return None
    return "fa3" if _HOPPER.search(card) else "flashinfer" if _BLACKWELL.search(card) else "triton"
