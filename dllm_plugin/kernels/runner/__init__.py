"""Stand in for the Triton kernels of vLLM's model runner on CPUs."""
