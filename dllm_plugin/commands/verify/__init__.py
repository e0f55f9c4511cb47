"""Verify a checkpoint: decode by the engine and by a second, plain implementation, and compare."""

from pathlib import Path

from dllm_plugin.commands.options import text_of

# Problems of several steps, whose answers take many forwards of any model.
PROMPTS = Path(__file__).with_name("prompts.txt")


def read_prompts(file: str | Path) -> list[str]:
    """Read one prompt a line."""
    lines = text_of("--prompts", file).splitlines()
    if prompts := [line for line in lines if line.strip()]:
        return prompts
    raise ValueError(f"--prompts {file} has no prompt: write one a line")
