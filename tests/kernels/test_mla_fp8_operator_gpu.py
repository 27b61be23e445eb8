"""Which kernel a server on this card gets, and when; what they compute is in test_mla_fp8_gpu.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mla_problems import problem  # noqa: E402

from mla_diag.kernels import mla_fp8_sm90  # noqa: E402
from mla_diag.kernels.mla_fp8 import mla_fp8  # noqa: E402
from mla_diag.kernels.mla_fp8_operator import attend, schedule  # noqa: E402
from mla_diag.kernels.mla_fp8_sm90 import Schedule as HopperSchedule  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_hopper_gets_its_own_kernel_and_other_cards_triton() -> None:
    case = problem(16, [500, 70], device="cuda")
    kernel = mla_fp8 if mla_fp8_sm90.unavailable() else mla_fp8_sm90.mla_fp8_sm90
    assert torch.equal(case.run(operator=attend)[0], case.run(operator=kernel)[0])
    made = schedule(16, kv_indptr=case.addressing["kv_indptr"])
    assert isinstance(made, HopperSchedule) == (kernel is not mla_fp8)
    assert torch.equal(case.run(operator=attend, schedule=made)[0], case.run(operator=kernel)[0])


@pytest.mark.skipif(mla_fp8_sm90.unavailable() is not None, reason="needs a Hopper GPU")
@pytest.mark.parametrize("prepared", [True, False])
def test_a_capture_may_be_the_first_call(prepared: bool) -> None:
    """Prepared, Hopper's kernel is captured before its first launch; not prepared, the Triton one."""
    program = f"""
        import torch
        from mla_problems import problem, relative_error
        from mla_diag.kernels import mla_fp8_operator
        from mla_diag.kernels.mla_fp8 import mla_fp8
        from mla_diag.kernels.mla_fp8_sm90 import mla_fp8_sm90

        case = problem(64, [3000, 0, 65], device="cuda")
        out, lse = torch.full((3, 64, 512), torch.nan, device="cuda"), torch.empty(3, 64, device="cuda")
        if {prepared}:
            assert mla_fp8_operator.prepare(case.query.device) is None
        else:
            case.run()  # compiles the Triton kernel, as the eager runs before a capture do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.run(operator=mla_fp8_operator.attend, out=out, lse=lse)
        graph.replay()
        assert relative_error(out, case.reference()[0]) < 3e-4
        assert torch.equal(out, case.run(operator=mla_fp8_sm90 if {prepared} else mla_fp8)[0])
    """
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, environment = [sys.executable, "-c", textwrap.dedent(program)], os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
