"""Measure speed against the hardware's limit and against baselines: ``diffuplug bench MODE``."""
