"""The same attention in float64, row by row and without splits: what every kernel of this package is held to."""

from __future__ import annotations

import torch

__all__ = ["mla_reference"]


def mla_reference(
    query: torch.Tensor,
    pool: torch.Tensor,
    *,
    sm_scale: float,
    rows: list[torch.Tensor],
    query_lens: list[int] | None = None,
    causal: bool = True,
    kv_scale: float = 1.0,
    latent: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the dequantised pool in float64.

    Args:
        query: [T, H, 576], latent 512 then rope 64 (or what `latent` says), any floating dtype.
        pool: [rows, 576] or [rows, 1, 576], `float8_e4m3fn` or its bytes as `uint8`.
        sm_scale: factor of the scores.
        rows: for each request, the pool rows of its keys in order (see `csr_rows` and `paged_rows`).
        query_lens: query tokens a request; one each when absent.
        causal: whether the last query token stands at the last key, the one before it a key earlier, and so on.
        kv_scale: what one unit of the pool's numbers is worth.
        latent: width of the latent, which is also the value.

    Returns:
        Output [T, H, 512] and base-2 log-sum-exp [T, H], both float64. A token that sees no key gets zeros and -inf.
    """
    pool = pool.reshape(-1, pool.shape[-1]).view(torch.float8_e4m3fn)
    query = query.double()
    out = torch.zeros(*query.shape[:2], latent, dtype=torch.float64, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    token = 0
    for request, n_queries in enumerate(query_lens or [1] * len(rows)):
        keys = pool[rows[request].long()].double() * kv_scale
        for i in range(n_queries):
            visible = len(keys) - (n_queries - 1 - i if causal else 0)
            if visible > 0:
                scores = query[token] @ keys[:visible].T * sm_scale
                out[token] = torch.softmax(scores, -1) @ keys[:visible, :latent]
                lse[token] = torch.logsumexp(scores, -1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
            token += 1
    return out, lse


def csr_rows(indptr: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    """Pool rows of each request from a CSR pair at page size 1."""
    return [indices[a:b] for a, b in zip(indptr.tolist(), indptr.tolist()[1:], strict=False)]


def paged_rows(table: torch.Tensor, lens: torch.Tensor, page_size: int) -> list[torch.Tensor]:
    """Pool rows of each request from a page table [B, max_pages] and lengths [B]."""
    offsets = torch.arange(page_size, device=table.device)
    return [
        (pages.long()[:, None] * page_size + offsets).flatten()[:length]
        for pages, length in zip(table, lens.tolist(), strict=True)
    ]
