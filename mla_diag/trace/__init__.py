"""Bytes on disk to columns in memory: one PyTorch profiler trace, decoded and linked, and nothing concluded yet."""
