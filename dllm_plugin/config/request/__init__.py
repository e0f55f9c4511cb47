"""Read what a request asks for: every ``dllm_*`` argument and what excludes what."""
