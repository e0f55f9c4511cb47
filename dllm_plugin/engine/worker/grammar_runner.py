"""Hand checks of grammars to the sampler, and canvases back: what vLLM's model runner lacks.

vLLM copies whole canvases to the host with every step and keeps what is emitted; here the rest is
kept too, of requests with a grammar, so nothing more is copied and nothing waited for.
"""

from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.config.worker_carriers import unpack_canvases
from dllm_plugin.engine.grammars.messages import CanvasChecks, CanvasOutput


class AsyncCanvasOutput(AsyncModelRunnerOutput):
    """Wait for a step's result, and keep the canvases of some requests."""

    def __init__(self, output: AsyncOutput, req_ids: list[str]) -> None:
        self.output = output
        self.req_ids = req_ids

    def get_output(self) -> ModelRunnerOutput:
        """Return the result once it is on the host."""
        result = self.output.get_output()
        canvases = unpack_canvases(self.output.sampled_token_ids, result, self.req_ids)
        return CanvasOutput(**vars(result), canvases=canvases)


class GrammarRunner(GPUModelRunner):
    """Run vLLM's model runner with grammars on canvases."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample as vLLM does; with checks of canvases, hand them to the sampler first."""
        # vLLM's warm-up brings a bitmask of its own.
        if not isinstance(grammar_output, CanvasChecks):
            return super().sample_tokens(grammar_output)
        sampler: Any = self.sampler
        features = sampler.features
        if grammar_output.starts:
            features.automata.start(grammar_output.starts)
        payload = grammar_output.payload
        features.checks.stage(payload)
        output = super().sample_tokens(None)
        features.checks.stage(None)
        if payload is not None and isinstance(output, AsyncOutput):
            return AsyncCanvasOutput(output, payload.req_ids)
        return output
