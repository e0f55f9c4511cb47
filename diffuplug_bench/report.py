"""Report a measurement: progress, tables, and for the JSON line its machine and settings."""

import hashlib
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dllm_plugin
from diffuplug_bench.settings import Settings
from dllm_plugin.commands.installation import processor

Row = dict[str, Any]


class Progress:
    """Print each result at once, because a run takes minutes and may be interrupted.

    seconds   duration of each stage, in order
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, stage: str, result: str = "") -> None:
        """Print the duration of a stage and its result."""
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now
        seconds = self.seconds[stage]
        lines = [f"{stage}: {seconds:.0f} s"] + ([result] if result else [])
        print("\n".join(lines), flush=True)


def tell(name: str, row: Row) -> None:
    """Print a row as a table, so that an interrupted run leaves what it has measured."""
    print(table_of(name, [row]), flush=True)


def surroundings(settings: Settings, command: Sequence[str]) -> Row:
    """Return command, settings, hardware and versions."""
    return {
        "benchmark": settings.mode,
        "command": shlex.join(["diffuplug", *command]),
        "seed": settings.seed,
        "settings": asdict(settings),
        "hardware": _hardware(),
        "versions": _versions(),
    }


def _hardware() -> Row:
    import torch
    from vllm.platforms import current_platform

    cpu = {"processor": processor(), "threads": torch.get_num_threads()}
    if current_platform.is_cpu():
        return cpu
    devices = _output(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    )
    names = [line.split(", ") for line in devices.splitlines()]
    return cpu | {
        "gpu": current_platform.get_device_name(),
        "gpus": len(names) or None,
        "driver": names[0][-1] if names else None,
        "cuda": torch.version.cuda,
    }


def _versions() -> Row:
    import torch
    import transformers
    import vllm

    try:
        import triton
    except ImportError:
        triton_version = None
    else:
        triton_version = triton.__version__
    return {
        "diffuplug": dllm_plugin.__version__,
        "commit": _commit(),
        "sources": hash_of_sources(Path(dllm_plugin.__file__).parent),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """Return the commit of the source tree, with a + if it has changes; None without git."""
    root = Path(dllm_plugin.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    git = ("git", "-C", str(root))
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    return commit + "+" if _output(*git, "status", "--porcelain", "-uno") else commit


def hash_of_sources(package: Path) -> str:
    """Return the first digits of a SHA-256 over paths and contents of a package's Python files.

    Trees with different uncommitted changes have the same commit and different hashes.
    """
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix().encode()
        # A digest each, so that text that moves between files changes the hash.
        for content in (name, path.read_bytes()):
            total.update(hashlib.sha256(content).digest())
    return total.hexdigest()[:12]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def table_of(name: str, rows: Sequence[Row]) -> str:
    """Format rows as right-aligned columns, see `COLUMNS`; leave out absent keys."""
    columns = []
    for column in COLUMNS[name].split():
        key, form = column.split(":")
        if any(key in row for row in rows):
            cells = [_cell(row.get(key), form) for row in rows]
            width = max(map(len, [key, *cells]))
            columns.append([text.rjust(width) for text in [key, *cells]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


# The columns of each table: key and format, after a colon.
COLUMNS = {
    "host": "requests:d steps:d host_ms:.2f forward_ms:.2f step_ms:.2f",
    "step": """
        requests:d canvas:d context:d steps:d step_ms:.3f block_step_ms:.3f
        tokens_per_forward:.2f forwards_per_s:.1f positions_per_token:.1f
        gemm_ms:.3f kv_ms:.3f share_of_floor:.1% times_gemms:.2f
        logits_mb:.1f temporary_mb:.1f ar_step_ms:.3f times_ar_step:.2f""",
    "served": """
        mode:s requests:d canvas:d approximation:s answered:d
        tokens_per_s:.1f tokens_per_forward:.2f forwards_per_s:.1f
        positions_per_token:.1f void_share:.1% request_s:.3f first_tokens_s:.3f
        share_of_floor:.1% accuracy:.1% ar_tokens_per_s:.1f speedup_vs_ar:.2f""",
    "watched": """
        requests:d watched:d canvas:d tokens_per_s:.1f share_of_unwatched:.1%
        step_ms:.3f first_text_s:.3f
        forwards_per_request:.1f frames_per_request:.1f kb_per_request:.1f""",
    "adaptive": """
        requests:d width:d tokens_per_s:.1f tokens_per_forward:.2f mean_width:.1f
        ar_tokens_per_s:.1f speedup_vs_ar:.2f""",
    "drafts": """
        requests:d acceptance:d length:d tokens_per_s:.1f decode_tokens_per_s:.1f
        tokens_per_forward:.2f mean_rows:.1f break_even:.2f bound:.2f
        step_ms:.3f gemm_ms:.3f times_gemms:.2f
        ar_tokens_per_s:.1f ar_decode_tokens_per_s:.1f speedup_vs_ar:.2f
        decode_speedup:.2f of_bound:.2f""",
    "forwards": "requests:d rows:d ms:.3f gemm_ms:.3f times_gemms:.2f",
    "break_even": "requests:d plain_ms:.3f rows:d acceptance:.2f",
    "map_steps": "requests:d width:d context:d ms:.3f model_ms:.3f ratio:.2f",
    "map": "requests:d context:d fixed:.2f adaptive:.2f width:d fits:s",
    "hf": "tokens_per_forward:.2f ms_per_forward:.2f tokens_per_s:.2f accuracy:.1%",
    "schedules": """
        width:d accuracy:.1% tokens_per_forward:.2f positions_per_token:.1f""",
    "profile": """
        requests:d canvas:d steps:d timed_step_ms:.3f busy_ms:.3f forward_ms:.3f
        lm_head_ms:.3f exchange_ms:.3f sampler_ms:.3f copy_ms:.3f sampler_share:.1%
        timed_gap_share:.1% traced_gap_share:.1% whole_trace_gap_share:.1%
        gap_ms:.3f forward_gap_ms:.3f forward_kernels:.0f kernels:.0f""",
}
