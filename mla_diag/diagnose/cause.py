"""Where a finding comes from when the trace has no stack: the functions of a release that are known to do it.

The kernels around a copy tell the attention backend, the stage tells the function. The line is known for releases whose
sources have been read (sglang#35291 names the sites).
"""

from __future__ import annotations

import re

from mla_diag.diagnose.diagnosis import Cause
from mla_diag.diagnose.server_info import ServerInfo
from mla_diag.diagnose.step_spans import Stage

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
    return Cause(_ATTENTION_DIRECTORY + file, None, function, inferred=True)
