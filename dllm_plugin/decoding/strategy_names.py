"""Name the strategies: for whatever must not import torch, such as the command line."""

D2F = "d2f"
BLOCK_DIFFUSION = "block_diffusion"
SEMI_AUTOREGRESSIVE = "semi_autoregressive"
PREFIX_CACHE = "prefix_cache"
DUAL_CACHE = "dual_cache"
