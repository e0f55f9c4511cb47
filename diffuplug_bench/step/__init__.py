"""Time denoising steps, bound them by their GEMMs, and trace them."""
