"""Extend vLLM where it calls us: config hook, admission, schedulers, model state, sampler."""
