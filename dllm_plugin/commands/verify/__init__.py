"""Verify a checkpoint: decode by the engine and by a second, plain implementation, and compare."""
