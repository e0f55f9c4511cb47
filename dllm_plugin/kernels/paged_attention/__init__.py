"""Attend over pages of the `distinct` KV cache layout."""
