"""The metric logprob_distance; see docs/metrics.md."""
