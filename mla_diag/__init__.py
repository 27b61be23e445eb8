"""Find, explain and fix what an MLA decode or prefill step wastes on a live SGLang server."""

from mla_diag._version import __version__

__all__ = ["__version__"]
