"""Where a finding comes from when the trace has no stack."""

from __future__ import annotations

import pytest

from mla_diag.diagnose.cause import infer_pool_copy_cause, known_line
from mla_diag.diagnose.server_info import ServerInfo, parse_server_info
from mla_diag.diagnose.step_spans import Stage

FLASHINFER = "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<int>()"
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int> > >()"
DIRECTORY = "sglang/srt/layers/attention/"


def server(**fields: object) -> ServerInfo:
    return parse_server_info(fields)


@pytest.mark.parametrize(
    ("kernel", "stage", "info", "file", "function", "line"),
    [
        (FLASHINFER, Stage.DECODE, None, "flashinfer_mla_backend.py", "forward_decode", None),
        (FLASHINFER, Stage.PREFILL, server(version="0.5.17"), "flashinfer_mla_backend.py", "forward_extend", 598),
        (FLASHINFER, Stage.DECODE, server(version="0.5.17"), "flashinfer_mla_backend.py", "forward_decode", 660),
        (FA3, Stage.DECODE, server(version="0.5.17"), "flashattention_backend.py", "forward_decode", 1976),
        (FA3, Stage.DECODE, server(version="0.4.7"), "flashattention_backend.py", "forward_decode", None),
        (FLASHINFER, Stage.DECODE, server(version="9.9"), "flashinfer_mla_backend.py", "forward_decode", None),
        ("other", Stage.DECODE, server(attention_backend="fa3"), "flashattention_backend.py", "forward_decode", None),
        (
            *("other", Stage.DECODE, server(attention_backend="fa3", decode_attention_backend="flashinfer")),
            *("flashinfer_mla_backend.py", "forward_decode", None),
        ),
    ],
)
def test_the_kernel_tells_the_backend_and_the_release_the_line(
    kernel: str, stage: Stage, info: ServerInfo | None, file: str, function: str, line: int | None
):
    cause = infer_pool_copy_cause(kernel, stage, info)
    assert cause is not None
    assert (cause.file, cause.function, cause.line, cause.inferred) == (DIRECTORY + file, function, line, True)


@pytest.mark.parametrize(
    ("kernel", "stage", "info"),
    [
        ("other", Stage.DECODE, None),
        ("other", Stage.DECODE, server(attention_backend="triton")),
        (FLASHINFER, Stage.OTHER, None),
    ],
)
def test_what_is_not_known_is_not_said(kernel: str, stage: Stage, info: ServerInfo | None):
    assert infer_pool_copy_cause(kernel, stage, info) is None


@pytest.mark.parametrize(("release", "line"), [("0.4.6.post5", 447), ("0.5.23", 822)])
def test_every_release_with_the_defect_has_its_lines(release: str, line: int):
    assert known_line(release, "flashinfer_mla_backend.py", "forward_decode") == line
    assert known_line("0.4.6.post4", "flashinfer_mla_backend.py", "forward_decode") is None
