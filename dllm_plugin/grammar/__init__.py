"""Structured output: what grammars allow on a canvas that is decided in any order.

The host's side (matchers, closings, state) knows ids and grammars; the device's side (step) knows
tensors. Neither knows vLLM's engine, which :mod:`dllm_plugin.engine.grammars.grammars` connects.
"""
