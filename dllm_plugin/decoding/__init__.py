"""Decide what a denoising step computes, unmasks and commits: torch and numpy alone."""
