"""Extend vLLM where it calls us: hooks, schedulers, model state, sampler, worker, metrics."""
