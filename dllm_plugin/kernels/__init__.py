"""Compute one operation a folder: Triton kernels beside their plain-torch reference."""
