"""``diffuplug bench step | throughput | latency | all``: speed beside its limit and baselines."""
