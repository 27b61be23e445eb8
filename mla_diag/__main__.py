"""`python -m mla_diag` is `mla-diag`."""

from mla_diag.cli import main

main()
