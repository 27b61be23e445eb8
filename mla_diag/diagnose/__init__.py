"""A linked trace to what it means: steps and stages, a ranking of ops by per-step time, findings."""
