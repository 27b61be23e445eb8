"""The fix on real releases of SGLang, from their wheels; `make releases` does all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mla_diag.fix.sites import Kind
from tests.fix.releases import UnreachableError, check

# One of each shape that the code has had, with its sites by CSR indices and by page table.
RELEASES = {
    "0.4.6.post5": (2, 0),
    "0.5.1": (2, 2),
    "0.5.4": (2, 2),
    "0.5.15": (3, 2),
    "0.5.19": (3, 2),
    "0.5.23": (3, 2),
}


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_release_is_fixed_verified_and_reverted(release: str, tmp_path: Path) -> None:
    try:
        outcome = check(release, tmp_path)
    except UnreachableError as error:
        pytest.skip(f"the package index cannot be reached: {error}")
    assert outcome.problem is None
    assert outcome.patch is not None
    kinds = Counter(site.kind for file in outcome.patch.files if file.problem is None for site in file.sites)
    assert (kinds[Kind.CSR], kinds[Kind.PAGE_TABLE]) == RELEASES[release]
