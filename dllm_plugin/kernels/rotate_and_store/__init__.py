"""Rotate queries and keys and store keys and values, in one kernel."""
