"""Serve frames, fills and likelihoods over HTTP: an endpoint plugin of vLLM's server."""
