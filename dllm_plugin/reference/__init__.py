"""Decode with plain loops over a plain model: the second implementation to compare with."""
