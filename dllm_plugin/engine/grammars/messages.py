"""Messages of the scheduler and the workers about requests with a grammar."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.grammar.payload import AutomatonStart, GrammarPayload


@dataclass
class CanvasChecks(GrammarOutput):
    """Send checks of canvases to the workers, in place of bitmasks, and automata that start."""

    payload: GrammarPayload | None = None
    starts: list[AutomatonStart] = field(default_factory=list)


@dataclass
class CanvasOutput(ModelRunnerOutput):
    """Return canvases beside what vLLM returns: ids from the first uncommitted position on."""

    canvases: dict[str, list[int]] = field(default_factory=dict)
