"""Tests of mla_diag.trace, one module each."""
