"""Bytes on disk to columns in memory: one PyTorch profiler trace, decoded, linked, and nothing concluded from it yet."""
