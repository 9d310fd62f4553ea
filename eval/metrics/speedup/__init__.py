"""The metric speedup; see docs/metrics.md."""
