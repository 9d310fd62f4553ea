"""The metric first_divergence; see docs/metrics.md."""
