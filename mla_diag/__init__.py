"""Find, explain and fix what an MLA decode or prefill step wastes on a live SGLang server.

`explain` is the library's entry: it reads traces and returns a `Diagnosis`, whose `ops` and `steps` are DataFrames.
"""

from typing import TYPE_CHECKING, Any

from mla_diag._version import __version__

if TYPE_CHECKING:
    from mla_diag.diagnose.diagnosis import Diagnosis
    from mla_diag.diagnose.explain import explain

__all__ = ["Diagnosis", "__version__", "explain"]


def __getattr__(name: str) -> Any:
    # Imported when asked for, because the command line imports this package to print its version.
    if name == "explain":
        from mla_diag.diagnose.explain import explain

        return explain
    if name == "Diagnosis":
        from mla_diag.diagnose.diagnosis import Diagnosis

        return Diagnosis
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
