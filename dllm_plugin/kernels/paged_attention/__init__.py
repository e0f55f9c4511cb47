"""Attend over pages of the `distinct` KV cache layout, and store into them."""
