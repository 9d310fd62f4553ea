"""The metric sample_distance; see docs/metrics.md."""
