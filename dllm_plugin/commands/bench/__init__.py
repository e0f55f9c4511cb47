"""Measure speed against the hardware's limit and against baselines: ``diffuplug bench MODE``.

`command` runs the modes step, throughput, latency and all; `host` runs the mode host.
"""
