"""Compute one operation a folder: a plain-torch reference and a Triton kernel, one signature."""
