"""Where tests find recorded traces, and what they run kernels on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.commands.invoke import Invoke

REPOSITORY = Path(__file__).resolve().parents[1]

# Without a GPU kernels run in Triton's interpreter, which has to be chosen before anything imports them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# What a script starts in the background ignores Ctrl-C, and with it all that is started here; tests are about it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared: a slow example is no failure.
settings.register_profile("mla-diag", max_examples=60, deadline=None)
settings.load_profile("mla-diag")


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The recorded traces that come with the repository."""
    return REPOSITORY / "traces"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded traces that are not ours to give away: beside the repository, or where MLA_DIAG_SHARED_TRACES says."""
    given = os.environ.get("MLA_DIAG_SHARED_TRACES")
    path = Path(given) if given else REPOSITORY.parent / "shared" / "traces"
    if not path.is_dir():
        pytest.skip(f"no shared traces at {path}; MLA_DIAG_SHARED_TRACES may name another place")
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs `mla-diag` with some arguments."""
    return Invoke(monkeypatch, capsys)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that answer at once or never: what may take them seconds is waited for in fractions of one."""
    monkeypatch.setattr("mla_diag.server.capture._GRACE", 0.5)
    for module in ("bench.process", "server.capture", "server.client"):
        monkeypatch.setattr(f"mla_diag.{module}._PAUSE", 0.05)
