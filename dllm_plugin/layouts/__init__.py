"""KV cache layouts of our own, each with its attention backend."""
