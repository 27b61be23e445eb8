"""Collectives among kernels, by their names: those of NCCL and RCCL and those that serving engines write themselves."""

from __future__ import annotations

import re

# ncclDevKernel_*, ncclKernel_* (RCCL keeps NCCL's names); SGLang's, vLLM's and AITER's custom all-reduce; symmetric
# memory; QuickReduce; MSCCL++; FlashInfer's fusions; DeepEP's namespaces; NVSHMEM.
_COLLECTIVE = re.compile(
    r"\bncclDev|\bncclKernel|\brccl|msccl|nvshmem|multimem_|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce|one_shot_reduce|two_shot_reduce|quick_?reduce|moe_?a2a"
    r"|(?:deep_ep|intranode|internode|internode_ll)::\w*(?:dispatch|combine|notify)",
    re.IGNORECASE,
)


def is_communication(kernel: str) -> bool:
    """Whether a kernel exchanges data with other ranks, by its name."""
    return bool(_COLLECTIVE.search(kernel))
