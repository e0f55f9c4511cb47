"""Compile the grammars of requests in the engine's process."""
