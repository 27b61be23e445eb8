"""Absorbed MLA attention over an FP8 pool by whichever kernel is the device's: what the fix puts into a server.

Two kernels do the same: the Triton one of `mla_fp8` on every card from SM80, the CUDA C++ one of `mla_fp8_sm90` on
Hopper. `mla-diag fix --apply` copies this file and what it imports beside SGLang's attention backends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

# Relative, because a copy beside SGLang's backends lies in another package.
from .mla_fp8 import Schedule, mla_fp8, mla_schedule
from .mla_fp8_sm90 import Schedule as HopperSchedule
from .mla_fp8_sm90 import mla_fp8_sm90, mla_sm90_schedule, unavailable

__all__ = ["attend", "prepare", "schedule"]

# Why Hopper's kernel cannot run on a device that it is for; None where it is loaded.
_refusals: dict[int, str | None] = {}


def prepare(device: torch.device) -> str | None:
    """Build and load Hopper's kernel where it is for, which takes a second or two the first time on a machine.

    A CUDA graph's capture allows no loading, so this has to be called once before the first; in a capture it does
    nothing, and the Triton kernel is what is captured.

    Args:
        device: where attention will run.

    Returns:
        Why a Hopper card has to make do with the Triton kernel; None where it has not to, and on other cards.
    """
    if not _is_hopper(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _refusals:
        if torch.cuda.is_current_stream_capturing():
            return "it was not loaded before a CUDA graph was captured"
        _refusals[index] = unavailable(device)
    return _refusals[index]


def schedule(
    heads: int, *, kv_indptr: torch.Tensor, qo_indptr: torch.Tensor | None = None, tokens: int | None = None
) -> Schedule | HopperSchedule:
    """Plan a step of CSR requests on the device, for all its layers.

    Args:
        heads: query heads.
        kv_indptr: [B + 1] int32.
        qo_indptr: [B + 1] int32 in extend.
        tokens: query tokens, in extend.

    Returns:
        What `attend` is to be given at these very lengths. Recorded in a CUDA graph, it is made anew by every replay.
    """
    plan = mla_sm90_schedule if _takes_hopper(kv_indptr.device) else mla_schedule
    return plan(heads, kv_indptr=kv_indptr, qo_indptr=qo_indptr, tokens=tokens)


def attend(
    query: torch.Tensor, pool: torch.Tensor, *, schedule: Schedule | HopperSchedule | None = None, **call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to an FP8 pool with an absorbed MLA query, without copying the pool.

    Args:
        query: [T, H, 512] with `query_rope`, or [T, H, 576]; BF16 or FP16.
        pool: e4m3 numbers of shape [rows, 1, 576] or [pages, page_size, 1, 576].
        schedule: from `schedule`, whose kernel then runs.
        **call: `mla_fp8`'s arguments that `mla_fp8_sm90` has too, by name.

    Returns:
        The output [T, H, 512] and the log-sum-exp [T, H].

    Raises:
        ValueError: shapes, dtypes or the combination of arguments do not fit.
    """
    hopper = _takes_hopper(query.device) if schedule is None else isinstance(schedule, HopperSchedule)
    return (mla_fp8_sm90 if hopper else mla_fp8)(query, pool, schedule=schedule, **call)  # type: ignore[arg-type]


def _takes_hopper(device: torch.device) -> bool:
    """Whether calls on a device are for Hopper's kernel."""
    return _is_hopper(device) and prepare(device) is None


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
