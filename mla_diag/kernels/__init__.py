"""Attention over an FP8 KV pool: the Triton kernel that reads the pool as it lies, and the reference it is held to."""
