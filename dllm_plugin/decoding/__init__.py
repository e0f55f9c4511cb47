"""Decide what a denoising step computes, unmasks and commits: only torch and numpy."""
