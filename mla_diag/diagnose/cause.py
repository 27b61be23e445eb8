"""Where a finding comes from when the trace has no stack: the functions of a release that are known to do it.

The kernels around a copy tell the attention backend, the stage tells the function, the server's release tells the line:
that of the cast (sglang#35291), which `make releases` reads from the sources of every release.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import msgspec

from mla_diag.diagnose.diagnosis import Cause
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage

_KNOWN_SITES = Path(__file__).with_name("known_sites.json")
_ATTENTION_DIRECTORY = "sglang/srt/layers/attention/"
# The kernel that reads the copy, the backend that launches it.
_BACKENDS = (
    (re.compile(r"BatchMLAPage", re.IGNORECASE), "flashinfer_mla_backend.py"),
    (re.compile(r"FlashAttn|flash_fwd", re.IGNORECASE), "flashattention_backend.py"),
)
_SERVER_BACKENDS = {"flashinfer": "flashinfer_mla_backend.py", "fa3": "flashattention_backend.py"}
_FUNCTIONS = {Stage.DECODE: "forward_decode", Stage.PREFILL: "forward_extend", Stage.MIXED: "forward_extend"}


def infer_pool_copy_cause(attention_kernel: str, stage: Stage, server: ServerInfo | None) -> Cause | None:
    """The function that copies the pool for an attention kernel, inferred; None where nothing is known of its backend.

    Args:
        attention_kernel: The name of the kernel that reads the copy.
        stage: The stage that it is launched in.
        server: What the server says of its backends, if it was asked.
    """
    file = next((file for pattern, file in _BACKENDS if pattern.search(attention_kernel)), None)
    if file is None and server is not None:
        own = server.decode_backend if stage is Stage.DECODE else server.prefill_backend
        file = _SERVER_BACKENDS.get(own or server.attention_backend or "")
    function = _FUNCTIONS.get(stage)
    if file is None or function is None:
        return None
    release = None if server is None else server.version
    return Cause(_ATTENTION_DIRECTORY + file, known_line(release, file, function), function, inferred=True)


def known_line(release: str | None, file: str, function: str) -> int | None:
    """The line of the cast in a method of a backend file of some release; None where it is not known."""
    return _known_sites().get(release or "", {}).get(file, {}).get(function)


@lru_cache(maxsize=1)
def _known_sites() -> dict[str, dict[str, dict[str, int]]]:
    return msgspec.json.decode(_KNOWN_SITES.read_bytes(), type=dict[str, dict[str, dict[str, int]]])
