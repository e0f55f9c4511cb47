"""The bodies of vLLM that we override or rely on are those that we have read.

Signatures say nothing of what a body means: `vllm_bodies.txt` holds a fingerprint of each, for this
release and for the next one. What is new in a release comes by `vllm_bodies.py`.
"""

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path

import pytest
import vllm
import vllm_bodies
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner
from vllm_bodies import GONE, UNKNOWN, fingerprint, read_table

import dllm_plugin
from dllm_plugin.kernels import runner as cpu
from dllm_plugin.omni import workers

SOURCES = Path(vllm.__file__).parent
THIS, NEXT = "0.32", "0.33"
LEFT_OUT = "dllm_plugin.commands"  # which override nothing, and need packages of extras
# What `dllm_plugin.omni.workers` puts its mixins before, of either model runner.
RUNNERS = (gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner)
# Bodies that are called or stood in for, and whose meaning we rely on.
RELIED_ON = """
v1.core.sched.scheduler:Scheduler _preempt_request
v1.core.sched.async_scheduler:AsyncScheduler _update_after_schedule _update_request_with_output
v1.core.kv_cache_manager:KVCacheManager allocate_slots cache_blocks evict_blocks get_block_ids
v1.core.block_pool:BlockPool free_blocks
v1.core.kv_cache_utils: get_request_block_hasher
v1.request:Request update_block_hashes
v1.worker.gpu.model_runner:GPUModelRunner add_requests finish_requests prepare_inputs sample_tokens
v1.worker.gpu.model_runner:GPUModelRunner postprocess_sampled _dummy_run _dummy_sampler_run
v1.worker.gpu.model_runner:GPUModelRunner update_requests execute_model
v1.worker.gpu.model_runner:GPUModelRunner update_pp_decode_requests load_model
v1.worker.gpu.pp_utils:PPHandler broadcast broadcast_drafts get_prev_sampled_outputs receive
v1.worker.gpu.pp_utils: compute_need_sampled_mask
v1.worker.gpu.input_batch:InputBatch make_dummy
v1.worker.gpu.states:RequestState add_request
v1.worker.gpu.dp_utils: sync_cudagraph_and_dp_padding
v1.worker.gpu.cudagraph_utils:CudaGraphManager _init_candidates dispatch
v1.worker.gpu.block_table:BlockTables append_block_ids gather_block_tables compute_slot_mappings
v1.engine.input_processor:InputProcessor process_inputs _validate_params
sampling_params:SamplingParams update_from_tokenizer
entrypoints.launchers.launcher: serve_http watchdog_loop terminate_if_errored
v1.engine.async_llm:AsyncLLM shutdown
v1.structured_output:StructuredOutputManager grammar_init _create_grammar clear_backend
v1.engine.output_processor:OutputProcessor propagate_error
model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig \
  get_scheme_dict _add_fused_moe_to_target_scheme_map
"""


def relied_on() -> set[str]:
    kernels = [name.rpartition(".") for name in cpu.KERNELS]
    symbols = {f"{module}:{name}" for module, _, name in kernels}
    for line in RELIED_ON.split("\n"):
        owner, *names = line.split() or [""]
        joint = "" if owner.endswith(":") else "."
        symbols |= {f"vllm.{owner}{joint}{name}" for name in names}
    return symbols


def mixed_in() -> set[str]:
    """What mixins define that the runners which workers of ours put them before define, too."""
    symbols = set()
    for worker in (workers.ARWorker, workers.DiffusionWorker):
        for mixin, runner in zip(worker.runners, RUNNERS, strict=True):
            for name in {name for base in mixin.__mro__[:-1] for name in vars(base)}:
                above = [base for base in runner.__mro__ if name in vars(base)]
                if above and _is_code(vars(above[0])[name]):
                    symbols.add(f"{above[0].__module__}:{above[0].__qualname__}.{name}")
    return symbols


@cache
def overridden() -> set[str]:
    """What our classes define that a class of vLLM above them defines, too."""
    symbols = mixed_in()
    for info in pkgutil.walk_packages(dllm_plugin.__path__, "dllm_plugin."):
        if info.name.startswith(LEFT_OUT):
            continue
        module = importlib.import_module(info.name)
        for owner in vars(module).values():
            if not isinstance(owner, type) or owner.__module__ != info.name:
                continue
            for name, value in vars(owner).items():
                above = [base for base in owner.__mro__[1:] if name in vars(base)]
                if (
                    above
                    and above[0].__module__.startswith("vllm.")
                    and _is_code(value)
                ):
                    symbols.add(f"{above[0].__module__}:{above[0].__qualname__}.{name}")
    return {symbol for symbol in symbols if fingerprint(SOURCES, symbol) != GONE}


def _is_code(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(
        value, property | staticmethod | classmethod
    )


def test_the_table_lists_what_we_override_and_rely_on() -> None:
    versions, table = read_table()
    assert len(overridden()) > 40
    wanted = overridden() | relied_on()
    unknown = [UNKNOWN] * (len(versions) - 1)
    lines = [
        [s, fingerprint(SOURCES, s), *unknown] for s in sorted(wanted - set(table))
    ]
    assert not lines, "read these bodies, then add: " + ", ".join(map(" ".join, lines))
    assert not set(table) - wanted, "take these lines out of vllm_bodies.txt"


def test_bodies_are_those_that_we_have_read() -> None:
    versions, table = read_table()
    assert vllm.__version__.startswith(THIS)
    column = versions.index(THIS)
    changed = [
        s for s, marks in table.items() if marks[column] != fingerprint(SOURCES, s)
    ]
    assert not changed, f"read again, then correct the table: {changed}"
    assert not [symbol for symbol, marks in table.items() if marks[column] == GONE]


def test_what_the_next_release_moves() -> None:
    """Among others the four of which signatures say nothing."""
    versions, table = read_table()
    assert versions[-1] == NEXT
    changed = vllm_bodies.moved(table)
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler."
    assert scheduler + "update_from_output" in changed
    gone = (
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output"
    )
    assert table[gone][versions.index(NEXT)] == GONE
    assert len(changed) < len(table) / 2


def test_fingerprints_see_only_code(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "class A:\n    def f(self, x: int) -> int:\n        return x\n"
    )
    (tmp_path / "two.py").write_text(
        'class A:\n    def f(self, x):\n        """Return it."""\n        return x  # it\n'
    )
    (tmp_path / "three.py").write_text(
        "class A:\n    def f(self, x):\n        return x + 1\n"
    )
    one, two, three = (
        fingerprint(tmp_path, f"vllm.{n}:A.f") for n in ("one", "two", "three")
    )
    assert one == two != three
    assert (
        fingerprint(tmp_path, "vllm.one:A.g")
        == fingerprint(tmp_path, "vllm.four:A.f")
        == GONE
    )


def test_a_release_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_bodies, "TABLE", tmp_path / "table")
    vllm_bodies.write_table(["1"], {"vllm.a:f": ["old"], "vllm.b:g": ["old"]})
    (tmp_path / "b.py").write_text("def g(): pass\n")
    vllm_bodies.main(str(tmp_path), "2")
    assert capsys.readouterr().out == "vllm.a:f is gone\nvllm.b:g has another body\n"
    assert read_table()[0] == ["1", "2"]
