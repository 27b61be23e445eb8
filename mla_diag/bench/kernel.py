"""Time the decode attention of one MLA layer over an FP8 pool: every alternative installed, against the roofline.

Each row is one decode step of one layer, replayed from a CUDA graph: `batch` requests of `context` tokens, rows
scattered over a pool of the size SGLang really allocates. Replays find what fits of the pool in L2, for every
alternative alike.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph

from mla_diag.bench.rows import LATENT, ROPE, WIDTH, Ceilings, Row, Shape
from mla_diag.kernels import mla_fp8_operator
from mla_diag.kernels.mla_fp8 import mla_fp8, mla_schedule, workspace_bytes
from mla_diag.kernels.mla_fp8_sm90 import mla_fp8_sm90, mla_sm90_schedule, unavailable
from mla_diag.kernels.mla_fp8_sm90 import workspace_bytes as sm90_workspace_bytes
from mla_diag.kernels.reference import csr_rows, mla_reference

__all__ = ["ALTERNATIVES", "STRATEGIES", "Case", "bench_kernels", "measure_ceilings"]

POOL_ROWS = 495_552  # the pool of the server in which the whole-pool copy was first measured
SM_SCALE = (128 + 64) ** -0.5  # DeepSeek's head widths before absorption
HEADS = (16, 64, 128)
CASES = ((1, 2048), (1, 32768), (1, 131072), (16, 2048), (16, 8192), (64, 2048), (64, 8192), (128, 4096))
CHECKED_REQUESTS = 4  # float64 takes a while
TURNS = 4

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """The tensors of one shape. The BF16 pool holds the FP8 pool's numbers, so that all alternatives agree."""

    shape: Shape
    pool: torch.Tensor
    pool_bf16: torch.Tensor
    indices: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    out: torch.Tensor

    @cached_property
    def indptr(self) -> torch.Tensor:
        """[B + 1] int32, where each request's indices begin."""
        return torch.arange(self.shape.batch + 1, dtype=torch.int32, device=self.pool.device) * self.shape.context

    @classmethod
    def draw(cls, shape: Shape, pool: torch.Tensor, pool_bf16: torch.Tensor, seed: int = 0) -> Case:
        """Draw random queries and rows; rows repeat only where the pool is smaller than what is referenced."""
        device, total = pool.device, shape.batch * shape.context
        generator = torch.Generator(device=device).manual_seed(seed)
        if total > len(pool):
            indices = torch.randint(len(pool), (total,), device=device, generator=generator)
        else:
            indices = torch.randperm(len(pool), device=device, generator=generator)[:total]
        query = torch.randn(shape.batch, shape.heads, WIDTH, device=device, generator=generator).bfloat16()
        nope, rope = query[..., :LATENT].contiguous(), query[..., LATENT:].contiguous()
        return cls(shape, pool, pool_bf16, indices.int(), nope, rope, torch.empty_like(nope))

    def error(self, step: Step) -> float:
        """Run `step` into a poisoned output and compare the first requests with the reference.

        Raises:
            ArithmeticError: the output has an infinity, or a NaN, which is also what was never written.
        """
        self.out.fill_(torch.nan)
        got = step()
        some = min(self.shape.batch, CHECKED_REQUESTS)
        query = torch.cat([self.nope, self.rope], -1)[:some]
        rows = csr_rows(self.indptr[: some + 1], self.indices)
        want, _ = mla_reference(query, self.pool, sm_scale=SM_SCALE, rows=rows)
        if not got.isfinite().all():
            raise ArithmeticError("the output is not finite")
        return float((got[:some].double() - want).norm() / want.norm())


def _flashinfer(case: Case, dtype: torch.dtype, indices: torch.Tensor) -> Any:
    """A planned FlashInfer MLA wrapper that reads a pool of `dtype`."""
    import flashinfer  # noqa: PLC0415 (optional)

    shape, device = case.shape, case.pool.device
    queries = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=device),
        use_cuda_graph=True, qo_indptr=queries.clone(), kv_indptr=case.indptr.clone(), kv_indices=indices.clone(),
        kv_len_arr=lens.clone(), backend="fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "auto",
    )  # fmt: skip
    modes = inspect.signature(wrapper.plan).parameters
    quantised = dtype == torch.float8_e4m3fn
    mode = {"scale_mode": "kv-per-tensor"} if quantised and "scale_mode" in modes else {}
    wrapper.plan(queries, case.indptr, indices, lens, shape.heads, LATENT, ROPE, 1, False, SM_SCALE,
                 case.nope.dtype, dtype, **mode)  # fmt: skip
    return wrapper


def _ours(case: Case) -> Step:
    # Scheduled outside of the step, as FlashInfer's plan() is: once for all layers.
    schedule = mla_schedule(case.shape.heads, kv_indptr=case.indptr)
    workspace = torch.empty(workspace_bytes(case.pool.device), dtype=torch.uint8, device=case.pool.device)

    def step() -> torch.Tensor:
        return mla_fp8(case.nope, case.pool, query_rope=case.rope, kv_indptr=case.indptr, kv_indices=case.indices,
                       sm_scale=SM_SCALE, out=case.out, schedule=schedule, workspace=workspace)[0]  # fmt: skip

    return step


def _ours_hopper(case: Case) -> Step:
    if (reason := unavailable(case.pool.device)) is not None:
        raise NotImplementedError(reason)
    schedule = mla_sm90_schedule(case.shape.heads, kv_indptr=case.indptr)
    workspace = torch.empty(sm90_workspace_bytes(case.pool.device), dtype=torch.uint8, device=case.pool.device)

    def step() -> torch.Tensor:
        return mla_fp8_sm90(case.nope, case.pool, query_rope=case.rope, kv_indptr=case.indptr, kv_indices=case.indices,
                            sm_scale=SM_SCALE, out=case.out, schedule=schedule, workspace=workspace)[0]  # fmt: skip

    return step


def _operator(case: Case) -> Step:
    """What the fix puts into a server: as there, the workspace is allocated in the step."""
    mla_fp8_operator.prepare(case.pool.device)
    schedule = mla_fp8_operator.schedule(case.shape.heads, kv_indptr=case.indptr)

    def step() -> torch.Tensor:
        return mla_fp8_operator.attend(
            case.nope, case.pool, query_rope=case.rope, kv_indptr=case.indptr, kv_indices=case.indices,
            sm_scale=SM_SCALE, out=case.out, schedule=schedule,
        )[0]  # fmt: skip

    return step


def _native_fp8(case: Case) -> Step:
    wrapper = _flashinfer(case, case.pool.dtype, case.indices)
    if "ckv_scale" not in inspect.signature(wrapper.run).parameters:
        raise NotImplementedError("this FlashInfer has no FP8 MLA")
    latent, rope = case.pool[..., :LATENT], case.pool[..., LATENT:]
    return lambda: wrapper.run(case.nope, case.rope, latent, rope, out=case.out, ckv_scale=1.0, kpe_scale=1.0)


def _bf16_pool(case: Case) -> Step:
    wrapper = _flashinfer(case, torch.bfloat16, case.indices)
    latent, rope = case.pool_bf16[..., :LATENT], case.pool_bf16[..., LATENT:]
    return lambda: wrapper.run(case.nope, case.rope, latent, rope, out=case.out)


def _cast(case: Case) -> Step:
    wrapper = _flashinfer(case, torch.bfloat16, case.indices)

    def step() -> torch.Tensor:
        pool = case.pool.bfloat16()
        return wrapper.run(case.nope, case.rope, pool[..., :LATENT], pool[..., LATENT:], out=case.out)

    return step


def _gather(case: Case) -> Step:
    dense = torch.arange(len(case.indices), dtype=torch.int32, device=case.pool.device)
    wrapper, rows = _flashinfer(case, torch.bfloat16, dense), case.indices.long()

    def step() -> torch.Tensor:
        pool = case.pool[rows].bfloat16()
        return wrapper.run(case.nope, case.rope, pool[..., :LATENT], pool[..., LATENT:], out=case.out)

    return step


#: What can serve a decode step over an FP8 pool. "bf16 pool" needs twice the memory: it is the bar, not a choice.
ALTERNATIVES: dict[str, Callable[[Case], Step]] = {
    "cast + bf16": _cast,
    "gather + bf16": _gather,
    "bf16 pool": _bf16_pool,
    "native fp8": _native_fp8,
    "mla-diag triton": _ours,
    "mla-diag hopper": _ours_hopper,
}

#: What `mla-diag fix` can put in the cast's place, by the strategy's name, and the cast.
STRATEGIES: dict[str, Callable[[Case], Step]] = {
    "kernel": _operator,
    "native": _native_fp8,
    "gather": _gather,
    "cast": _cast,
}


def measure_ceilings() -> Ceilings:
    """Measure the two ceilings: a 2 GiB copy within device memory and an 8192-cubed BF16 product of random numbers."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul_ms = do_bench(lambda: square @ square, return_mode="median")
    return Ceilings(bandwidth=2 * 2**31 / copy_ms * 1e3, matmul=2 * 8192**3 / matmul_ms * 1e3)


def bench_kernels(
    shapes: Sequence[Shape],
    ceilings: Ceilings,
    alternatives: Mapping[str, Callable[[Case], Step]] = ALTERNATIVES,
    *,
    pool_rows: int = POOL_ROWS,
    rep_ms: int = 30,
    device: str = "cuda",
) -> Iterator[Row]:
    """Time the alternatives at each shape, in turns.

    A card at its power limit lowers its clock, by up to 8 % within a second here. So the alternatives take turns, every
    other time in the opposite order, and what counts of each is the median of its turns.

    Args:
        shapes: the decode steps.
        ceilings: the card's, from `measure_ceilings`.
        alternatives: what prepares a step of each, by name.
        pool_rows: rows of the pool; the cast's cost is proportional to it.
        rep_ms: time spent on each measurement, all turns together.
        device: where; timing needs a GPU.

    Yields:
        A row an alternative and shape, as soon as the shape is measured. What fails here is a row with a reason.
    """
    pool_bf16 = torch.randn(pool_rows, 1, WIDTH, device=device, dtype=torch.bfloat16)
    pool = pool_bf16.to(torch.float8_e4m3fn)
    pool_bf16.copy_(pool)
    for seed, shape in enumerate(shapes):
        case = Case.draw(shape, pool, pool_bf16, seed)
        trials = [_Trial(name, prepare) for name, prepare in alternatives.items()]
        for trial in trials:
            trial.check(case)
        for turn in range(TURNS):
            for trial in trials[:: -1 if turn % 2 else 1]:
                trial.time(-(-rep_ms // TURNS))
        for trial in trials:
            us = None if trial.reason else statistics.median(trial.us)
            yield Row(shape, trial.name, us, trial.error, ceilings.roofline_us(shape), trial.reason)


@dataclass
class _Trial:
    """An alternative at a shape; once something of it has failed, nothing more is done."""

    name: str
    prepare: Callable[[Case], Step]
    step: Step | None = None
    error: float | None = None
    us: list[float] = field(default_factory=list)
    reason: str = ""

    def check(self, case: Case) -> None:
        with self._reasoning():
            self.step = self.prepare(case)
            self.error = case.error(self.step)

    def time(self, rep_ms: int) -> None:
        if self.step is not None and not self.reason:
            with self._reasoning():
                self.us.append(1e3 * do_bench_cudagraph(self.step, rep=rep_ms, return_mode="median"))

    @contextmanager
    def _reasoning(self) -> Iterator[None]:
        try:
            yield
        except (ArithmeticError, ImportError, NotImplementedError, RuntimeError, ValueError) as failure:
            self.error = None
            self.reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
