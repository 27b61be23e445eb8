"""Tests, one directory a package of mla_diag; `trace_builder` writes the small traces that they read."""
