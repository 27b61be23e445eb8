"""Kernels run on a GPU where there is one, else in Triton's interpreter (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
