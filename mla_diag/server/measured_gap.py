"""A recorded decode step beside its floor, with how much of what lies between is the copy of the pool."""

from __future__ import annotations

import msgspec

from mla_diag.diagnose.diagnosis import Diagnosis
from mla_diag.diagnose.gap import Gap
from mla_diag.diagnose.gpu import Gpu
from mla_diag.diagnose.pool import batch_sizes
from mla_diag.diagnose.rules import whole_pool_copy
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage
from mla_diag.server.exposure import expose
from mla_diag.server.model_config import ModelConfig

CONTEXT = 2000
"""Tokens of a request that the floor is worked out for where the traffic is other people's."""


def beside_floor(
    diagnosis: Diagnosis, server: ServerInfo, model: ModelConfig | None, gpu: Gpu, context: int
) -> Diagnosis:
    """The diagnosis with the floor of a decode step and the gap above it.

    Args:
        diagnosis: What was recorded; its first decode stage is the step that counts.
        server: What the recorded server says of itself.
        model: Its model's config, if that can be read.
        gpu: Its card.
        context: Tokens of each request.

    Returns:
        The diagnosis as it is where there is no decode step, or its floor is not known.
    """
    measured = next((stage for stage in diagnosis.stages if stage.stage is Stage.DECODE), None)
    if measured is None:
        return diagnosis
    batch = next((sizes[0] for name in measured.step_names if (sizes := batch_sizes(name))), 1)
    exposure = expose(server, model, gpu=gpu, batch=batch, context=context)
    floor = exposure.floor
    if floor is None:
        return diagnosis
    decode = next(stage for stage in exposure.stages if stage.stage is Stage.DECODE)
    copied = sum(
        finding.cost_ms_per_step or 0.0
        for finding in diagnosis.findings
        if finding.kind == whole_pool_copy.KIND and finding.stage is Stage.DECODE and finding.trace == measured.trace
    )
    gap = Gap(
        step_ms=measured.device_ms_per_step,
        measured=True,
        wall_ms=measured.wall_ms_per_step,
        gap_ms=measured.device_ms_per_step - floor.ms,
        copy_ms=copied,
        trace=measured.trace,
        copy_by_flags_ms=exposure.copy.ms_per_step if decode.copies and exposure.copy is not None else None,
    )
    return msgspec.structs.replace(diagnosis, floor=floor, gap=gap)
