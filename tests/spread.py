"""Order tests, and give each worker whole files, or files that share engines or a server.

Kernels come first, then units, for they build models in a process without engines. What takes
longest begins first within each of the three, so that the workers end together. Tests of a worker
that ask for the fixture `llm` are sorted by the name of their engine, across files.
"""

from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("kernels", "unit", "engine")
# Tests of these share nothing and take long: each is given out by itself.
ALONE = ("unit/test_structured_random.py",)
# Files that one worker runs together: they share what the first of them starts.
FULL, D2F = "engines of full attention", "engines of D2F"
TOGETHER: dict[str, tuple[str, ...]] = {
    FULL: (
        "engine/test_full_requests.py",
        "engine/test_templates.py",
        "engine/test_full_memory.py",
        "engine/test_targets.py",
        "engine/test_full_ahead.py",  # decodes the same texts by the plain loops
    ),
    D2F: (
        "engine/test_batching.py",
        "engine/test_sampling.py",
        "engine/test_stops_and_bans.py",
        "engine/test_golden_traces.py",
        "engine/test_requests_refused.py",
    ),
    "tiny server": (
        "engine/test_full_server.py",
        "engine/test_infill_api.py",
        "engine/test_infill_lengths.py",
        "engine/test_likelihood_api.py",
        "engine/test_infill_refused.py",
        "engine/test_api.py",
        "engine/test_frames_api.py",
        "engine/test_viewer_gaps.py",
    ),
    "bundled server": (
        "engine/test_structured_server.py",
        "engine/test_clients.py",
        "engine/test_viewer.py",
        "engine/test_documented_requests.py",
        "engine/test_fim_clients.py",
    ),
}
# From about 10 s on, by how long they run on a quiet machine; the others follow.
LONGEST = (
    "unit/test_structured_random.py",
    "unit/test_closings_random.py",
    "engine/test_full_requests.py",
    "engine/test_structured_server.py",
    "engine/test_stages_families.py",
    "engine/test_full_server.py",
    "engine/test_structured_outputs.py",
    "engine/test_faults.py",  # not beside the soak: both keep a server busy
    "engine/test_interrupts.py",
    "engine/test_bundled.py",
    "engine/test_bench_modes.py",
    "engine/test_omni_processes.py",
    "engine/test_grid_goldens.py",
    "engine/test_demo.py",
    "engine/test_soak.py",
    "engine/test_verify_command.py",
    "engine/test_installed.py",
    "engine/test_full_compiled.py",
    "engine/test_full_goldens.py",
    "engine/test_parallel.py",
    "engine/test_memory.py",
    "engine/test_progress.py",
    "engine/test_family_servers.py",
    "engine/test_grid_prefix.py",
    "engine/test_api_servers.py",
    "engine/test_stages.py",
    "engine/test_hosts.py",
    "engine/test_causal_goldens.py",
    "engine/test_block_goldens.py",
    "engine/test_replicas.py",
    "engine/test_prefill_decode.py",
    "engine/test_server.py",
    "engine/test_introspective.py",
    "engine/test_bench_widths.py",
    "engine/test_omni_servers.py",
    "engine/test_random_grammars.py",
    "engine/test_compiled.py",
    "engine/test_adapters.py",
    "engine/test_amx_engines.py",
    "engine/test_a2d.py",
    "engine/test_structure_goldens.py",
    "engine/test_batching.py",
    "engine/test_omni_pipelines.py",
    "engine/test_omni_hidden_states.py",
    "engine/test_schedules.py",
    "engine/test_startup_refused.py",
    "engine/test_distinct.py",
    "engine/test_weight_updates.py",
    "engine/test_traces.py",
    "engine/test_forked.py",
    "engine/test_context_end.py",
    "engine/test_full_plain.py",
)


def file_of(nodeid: str) -> str:
    """Return the path of a test's file below `tests`."""
    path = PurePath(nodeid.split("::", 1)[0])
    return "/".join(path.parts[-2:])


def scope_of(nodeid: str) -> str:
    """Return the name of what is given to one worker as a whole."""
    file = file_of(nodeid)
    if file in ALONE:
        return nodeid
    if file.startswith("kernels/"):
        return "kernels"
    for name, files in TOGETHER.items():
        if file in files:
            return name
    return file


def engine_of(item: pytest.Item) -> str:
    """Return the name of the shared engine that a test asks for, or nothing."""
    scope = scope_of(item.nodeid)
    if scope not in (FULL, D2F) or "llm" not in getattr(item, "fixturenames", ()):
        return ""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    if scope == FULL:
        return "-".join(params["decoder"])
    scheduling = "async" if params.get("overlapped") else "sync"
    return f"{params.get('family', 'llada')}-d2f-{scheduling}"


def rank(file: str) -> tuple[int, int]:
    """Return the place of a file: its folder's, and its own within the folder."""
    folder = file.split("/")[0]
    first = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    for files in TOGETHER.values():
        if file in files:
            file = files[0]
    second = LONGEST.index(file) if file in LONGEST else len(LONGEST)
    return first, second


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands scopes out in the order in which tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        """Give a worker its next scope before its last test, which runs only then.

        Earlier, a scope would wait for a long test while another worker has nothing to do.
        """
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def sort(items: list[pytest.Item]) -> None:
    """Put what takes longest first; else the order within a file stays."""
    items.sort(key=lambda item: (*rank(file_of(item.nodeid)), engine_of(item)))
