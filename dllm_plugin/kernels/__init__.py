"""Device kernels and their plain-torch twins."""
