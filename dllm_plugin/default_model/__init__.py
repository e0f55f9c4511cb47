"""Locate the bundled checkpoint (a small LLaDA) and its D2F adapter."""

from pathlib import Path


def path() -> str:
    """Return the folder of the checkpoint."""
    return str(Path(__file__).parent)


def adapter_path() -> str:
    """Return the folder of the checkpoint's D2F adapter, in PEFT's layout."""
    return str(Path(__file__).parent / "d2f")
