"""Random MLA problems with their answer: what the kernel tests share."""

from dataclasses import dataclass, replace

import torch

from mla_diag.kernels.mla_fp8 import mla_fp8
from mla_diag.kernels.reference import csr_rows, mla_reference, paged_rows

SM_SCALE = (128 + 64) ** -0.5
NAN_BYTE = 0x7F


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


@dataclass
class Problem:
    """A query, a pool in which every row that no request refers to is NaN, and how the kernel finds the rows."""

    query: torch.Tensor
    pool: torch.Tensor
    rows: list
    addressing: dict
    query_lens: list | None
    latent: int = 512

    def run(self, **options):
        """The output and LSE of `operator`, the output poisoned before, so that nothing is left unwritten."""
        shape = (*self.query.shape[:2], self.latent)
        options.setdefault("out", torch.full(shape, torch.nan, dtype=torch.float32, device=self.query.device))
        options.setdefault("lse", torch.full(shape[:2], torch.nan, device=self.query.device))
        query = {"query": self.query} | {k: options.pop(k) for k in ("query", "query_rope") if k in options}
        # Other widths than DeepSeek's are the Triton kernel's alone.
        width = {} if self.latent == 512 else {"latent": self.latent}
        options = {"pool": self.pool} | width | query | self.addressing | options
        return options.pop("operator", mla_fp8)(sm_scale=SM_SCALE, **options)

    def reference(self, **options):
        return mla_reference(
            self.query,
            self.pool,
            sm_scale=SM_SCALE,
            rows=self.rows,
            query_lens=self.query_lens,
            latent=self.latent,
            **options,
        )

    def check(self, tolerance=1e-3, causal=True, kv_scale=1.0, **options):
        """Hold the kernel to the reference: output by norm, LSE by element, no key meaning zeros and -inf."""
        got, lse = self.run(causal=causal, kv_scale=kv_scale, **options)
        want, want_lse = self.reference(causal=causal, kv_scale=kv_scale)
        unseen = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, unseen)
        assert (got[unseen] == 0).all()
        assert torch.isfinite(got).all()
        assert relative_error(got, want) < tolerance
        torch.testing.assert_close(lse[~unseen].double(), want_lse[~unseen], rtol=1e-5, atol=1e-3)

    def check_with_tokens_of_no_request(self, tolerance=1e-3, **options):
        """Give five more query tokens than `qo_indptr` has, as a CUDA graph for more tokens than came does."""
        want, want_lse = self.reference()
        got, lse = replace(self, query=torch.cat([self.query, torch.ones_like(self.query[:1]).repeat(5, 1, 1)])).run(
            **options
        )
        assert relative_error(got[:-5], want) < tolerance
        torch.testing.assert_close(lse[:-5].double(), want_lse, rtol=1e-5, atol=1e-3)
        assert (got[-5:] == 0).all()
        assert (lse[-5:] == -torch.inf).all()


def e4m3_pool(rows, width, device, generator, *, extremes):
    """Normal numbers, with the format's extremes in one row of eight if asked: 448, subnormals, negative zero.

    A key of 448 takes most of a query's attention. Without, it is broad, and every key counts.
    """
    pool = torch.randn(rows, width, generator=generator, device=device)
    if extremes:
        values = torch.tensor([448.0, -448.0, 2.0**-9, -(2.0**-9), 2.0**-6, 0.0, -0.0], device=device)
        odd = torch.arange(0, rows, 8, device=device)
        columns = torch.randint(width, (len(odd), len(values)), generator=generator, device=device)
        pool[odd[:, None], columns] = values
    return pool.to(torch.float8_e4m3fn).view(torch.uint8)


def problem(
    heads,
    lens,
    *,
    device,
    query_lens=None,
    page_size=None,
    csr=False,
    dtype=torch.bfloat16,
    seed=0,
    spread=1.0,
    widths=(512, 64),
    extremes=True,
):
    """Draw a problem.

    Args:
        heads: query heads.
        lens: keys of each request.
        device: where the tensors live.
        query_lens: query tokens of each request, for extend.
        page_size: None for a CSR pair over single rows, else a page table, or with `csr` a CSR pair over pages.
        csr: see `page_size`.
        dtype: of the query.
        seed: of everything drawn.
        spread: standard deviation of the query; large ones make attention peaky.
        widths: of latent and rope.
        extremes: whether the pool has the format's extremes too.
    """
    generator = torch.Generator(device).manual_seed(seed)
    page = page_size or 1
    pages = [-(-n // page) for n in lens]
    n_pages = sum(pages) + 5
    drawn = torch.randperm(n_pages, generator=generator, device=device)[: sum(pages)].int().split(pages)
    pool = e4m3_pool(n_pages * page, sum(widths), device, generator, extremes=extremes)
    lens_t = torch.tensor(lens, dtype=torch.int32, device=device)
    if page_size is None:
        indptr = torch.nn.functional.pad(lens_t.cumsum(0), (1, 0)).int()
        indices = torch.cat(drawn)
        addressing = {"kv_indptr": indptr, "kv_indices": indices}
        rows = csr_rows(indptr, indices)
    elif csr:
        indptr = torch.nn.functional.pad(torch.tensor(pages, device=device).cumsum(0), (1, 0)).int()
        indices = torch.cat(drawn)
        addressing = {"kv_indptr": indptr, "kv_indices": indices, "kv_lens": lens_t, "page_size": page_size}
        offsets = torch.arange(page, device=device)
        rows = [(own[:, None] * page + offsets).flatten()[:n] for own, n in zip(drawn, lens, strict=True)]
    else:
        # Entries past a request's pages are whatever was there before: here, far out of the pool.
        table = torch.full((len(lens), max([1, *pages]) + 1), 2**30, dtype=torch.int32, device=device)
        for request, entries in enumerate(drawn):
            table[request, : len(entries)] = entries
        addressing = {"page_table": table, "kv_lens": lens_t, "page_size": page_size}
        rows = paged_rows(table, lens_t, page_size)
    used = torch.zeros(len(pool), dtype=torch.bool, device=device)
    for request_rows in rows:
        used[request_rows.long()] = True
    pool[~used] = NAN_BYTE
    if query_lens is not None:
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        addressing["qo_indptr"] = starts.int().to(device)
    tokens = sum(query_lens or [1] * len(lens))
    query = torch.randn(tokens, heads, sum(widths), generator=generator, device=device) * spread
    return Problem(query.to(dtype), pool.view(torch.float8_e4m3fn), rows, addressing, query_lens, widths[0])
