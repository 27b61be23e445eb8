"""As in tests/kernels: without a GPU the kernel runs in Triton's interpreter, chosen before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
