"""The installed SGLang: find it, find the casts of its FP8 pool, rewrite, journal, verify and revert."""
