"""The bundled checkpoint (a small LLaDA and its D2F adapter) and the scripts that trained it."""

from pathlib import Path


def path() -> str:
    """Folder of the checkpoint."""
    return str(Path(__file__).parent)


def adapter_path() -> str:
    """Folder of the D2F adapter (PEFT layout) for it."""
    return str(Path(__file__).parent / "d2f")
