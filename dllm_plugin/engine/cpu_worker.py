"""Run vLLM's CPU worker with our model runner.

That worker names its runner's class where none can be put in its place, so the class of the runner
that it has just constructed is exchanged. Imported on CPUs alone: vLLM's module replaces functions
of torch.cuda.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from dllm_plugin.engine.adapters import AdapterWorker
from dllm_plugin.engine.adapters_cpu import AdapterRunner
from dllm_plugin.engine.grammar_runner import GrammarRunner
from dllm_plugin.engine.step_timer import TimingWorker
from dllm_plugin.engine.weight_updates_cpu import PackingWorker


class DiffusionCPUWorker(AdapterWorker, PackingWorker, TimingWorker, CPUWorker):
    """Run vLLM's CPU worker with grammars on canvases, adapters and new weights."""

    def init_device(self) -> None:
        """Initialize as vLLM does, then put our runner's methods before those of vLLM's."""
        super().init_device()
        runner = self.model_runner
        ours = (GrammarRunner, AdapterRunner, type(runner))
        runner.__class__ = type("DiffusionCPURunner", ours, {})
