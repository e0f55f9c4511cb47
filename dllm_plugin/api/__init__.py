"""Serve what only diffusion can show over HTTP: an endpoint plugin of vLLM's server."""
