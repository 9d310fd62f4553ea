"""The metric acceptance_length; see docs/metrics.md."""
