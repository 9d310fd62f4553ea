"""The metric exact_match_rate; see docs/metrics.md."""
