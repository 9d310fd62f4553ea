"""The metric acceptance_per_position; see docs/metrics.md."""
