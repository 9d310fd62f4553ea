"""The metric acceptance_rate; see docs/metrics.md."""
