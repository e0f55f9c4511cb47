"""Store keys and values in pages of the `distinct` KV cache layout."""
