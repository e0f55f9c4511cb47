"""Scripted models decoded by the real states and sampler: no engine, no weights, no attention.

A script is a function ``(visible tokens, position) -> logits`` that plays the model: the row that
predicts `position` and sees exactly `visible`. Its rows depend on what a real row would see under
the block-causal mask, so a wrong border, a stale carry or a late commit changes the text.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from dllm_plugin.config.decode import CHUNK_ROWS, DecodeConfig
from dllm_plugin.config.memory import StepSize
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.config.worker_carriers import FINISHED, PREEMPTED, pack_id
from dllm_plugin.engine.sampler import DiffusionSampler
from dllm_plugin.sampling.rows import VocabShard
from dllm_plugin.state.canvas_states import CanvasStates

if current_platform.is_cpu():
    # What vLLM's CPU worker imports first: buffers without pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401
from scripted_rows import EOS, MASK, VOCAB, Script, visible

DEVICE = torch.device(current_platform.device_type)
# By whether logits are shifted.
ARCHITECTURE = {False: "LLaDAModelLM", True: "DreamModel"}


class Pass(NamedTuple):
    """What one denoising step of one request did; positions are absolute."""

    lo: int  # first position fed
    hi: int  # end of the last open block
    commit: int  # leading positions whose KV became final
    full: str  # F or s per active block: fully or semi-activated
    accepted: list[tuple[int, int]]  # (position, token) in order
    saw_stop: bool
    emitted: list[int]


@dataclass
class Run:
    """A request on its way through the loop."""

    req_id: str
    slot: int
    prompt: list[int]
    script: Script
    params: SamplingParams
    end: int  # position behind the last token asked for
    output: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    # What each pass was fed, prompt first.
    texts: list[list[int]] = field(default_factory=list)
    prefilled: bool = False
    done: bool = False
    # Positions whose logits were no numbers, as the sampler counts them.
    broken: int = 0


def sampling(max_tokens: int, eos: int | None = EOS, **options: Any) -> SamplingParams:
    """Greedy sampling parameters as the front end hands them on; ``dllm_*`` are extra_args."""
    extra = {k: options.pop(k) for k in list(options) if k.startswith("dllm_")}
    options = {"temperature": 0.0, "extra_args": extra} | options
    params = SamplingParams(max_tokens=max_tokens, **options)
    params.update_from_generation_config({}, eos)
    return params


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers: on a busy machine a pool of threads mostly waits for itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Loop:
    """Continuous batching in miniature: prefill, then a step per call until all are done."""

    vocab, mask, eos = VOCAB, MASK, EOS

    def __init__(
        self,
        dllm: dict[str, Any],
        shift: bool = False,
        slots: int = 8,
        max_model_len: int = 64,
        shard: VocabShard | None = None,
        config: DecodeConfig | None = None,
        rows_at_once: int = CHUNK_ROWS,
    ) -> None:
        options = Options.from_user(dllm)
        config = config or resolve(
            options, ARCHITECTURE[shift], max_model_len, self.mask
        )
        self.config = replace(config, rows_at_once=rows_at_once)
        self.shift, self.shard = shift, shard
        self.canvas_length = self.config.canvas_length
        # The few values that are read of vLLM's ModelConfig.
        self.model_config: Any = SimpleNamespace(
            max_model_len=max_model_len,
            max_logprobs=self.vocab,
            dtype=torch.float32,
            get_vocab_size=lambda: self.vocab,
            hf_config=SimpleNamespace(eos_token_id=self.eos),
        )
        self.req_states = RequestState(
            slots, max_model_len, 4096, self.canvas_length, self.vocab, DEVICE
        )
        self.states = CanvasStates(
            self.config, self.model_config, self.req_states.draft_tokens
        )
        owner = SimpleNamespace(
            req_states=self.req_states,
            sampling_states=SamplingStates(slots, self.vocab),
        )
        vocab = self.vocab
        chunk = self.config.rows_at_once
        size = StepSize(4096, chunk, slots, self.canvas_length, vocab, vocab, 4, vocab)
        self.sampler = DiffusionSampler(
            owner, self.states, self.model_config, size, shard=self.shard
        )
        # As vLLM's, made before any step: tensors that steps make are of another kind, and what is
        # compiled for one serves no other.
        self.seq_lens = torch.zeros(slots, dtype=torch.int32, device=DEVICE)
        self.free = list(range(slots))
        self.running: list[Run] = []

    def start(
        self,
        prompt: list[int],
        script: Script,
        params: SamplingParams,
        req_id: str = "",
    ) -> Run:
        """Admit a request; its prompt runs in the next step."""
        assert params.max_tokens is not None
        end = min(len(prompt) + params.max_tokens, self.model_config.max_model_len)
        run = Run(req_id or f"request-{id(params)}", -1, prompt, script, params, end)
        self._admit(run)
        return run

    def _admit(self, run: Run) -> None:
        run.slot, run.prefilled = self.free.pop(), False
        text = run.prompt + run.output
        data = NewRequestData(
            run.req_id,
            run.prompt,
            [],
            run.params,
            None,
            ((),),
            0,
            None,
            prefill_token_ids=text,
        )
        self.req_states.prefill_len.np[run.slot] = len(text)
        self.req_states.all_token_ids.gpu[run.slot, : len(text)] = _ids(text)
        self.states.remove_request(
            run.req_id
        )  # as vLLM's runner does before it adds a request
        self.states.add_request(run.slot, data)
        self.sampler.add_request(run.slot, run.params)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.running.append(run)

    def preempt(self, run: Run) -> None:
        """Take a request's slot away; :meth:`resume` brings it back."""
        self._leave(run, pack_id(run.req_id, PREEMPTED))

    def finish(self, run: Run) -> None:
        """End a running request, or abort one that was preempted."""
        self._leave(run, pack_id(run.req_id, FINISHED))

    def _leave(self, run: Run, req_id: str) -> None:
        if run in self.running:
            self.running.remove(run)
            self.free.insert(0, run.slot)
        slot = self.states.remove_request(req_id)
        if slot is not None:
            self.sampler.remove_request(slot)

    def resume(self, run: Run) -> None:
        """Admit a preempted request again, its output so far being part of its prefill."""
        self._admit(run)

    def run(self, limit: int = 400) -> None:
        """Step until every request is done."""
        for _ in range(limit):
            if not self.running:
                return
            self.step()
        left = [run.req_id for run in self.running]
        raise AssertionError(f"not done after {limit} steps: {left}")

    def step(self) -> SamplerOutput:
        """One forward: canvases first, then the prefills of new requests."""
        canvases = [run for run in self.running if run.prefilled]
        prefills = [run for run in self.running if not run.prefilled]
        runs = canvases + prefills
        starts = self.states.start_N.tolist()
        fed = [
            min(self.width(run), self.model_config.max_model_len - starts[run.slot])
            for run in canvases
        ]
        batch = self.batch(canvases, fed, prefills)
        self.sampler.request_logits(batch)
        rows = [
            row
            for run, n in zip(canvases, fed, strict=True)
            for row in self._rows(run, n)
        ]
        if self.shift:
            texts = [(run.script, run.prompt + run.output) for run in prefills]
            rows += [script(text, len(text)) for script, text in texts]
        assert len(rows) == len(batch.logits_indices)
        before = [self._look(run) for run in canvases]
        for run, look in zip(canvases, before, strict=True):
            run.texts.append(run.prompt + run.output + look[2])
        logits = torch.from_numpy(
            np.array(rows, dtype=np.float32).reshape(-1, self.vocab)
        ).to(DEVICE)
        if self.shard is not None:  # behind the vocabulary stands what nobody may read
            (first, vocab, ranks), width = self.shard.columns, self.shard.width
            logits = torch.nn.functional.pad(
                logits, (0, ranks * width - vocab), value=float("nan")
            )
            logits = logits[:, first : first + width].contiguous()
        self.before_sampling(canvases, prefills)
        with one_thread():
            output = self.sampler(logits, batch)
        for index, (run, look) in enumerate(zip(canvases, before, strict=True)):
            sampled = output.sampled_token_ids[
                index, : int(output.num_sampled[index])
            ].tolist()
            assert int(output.num_rejected[index]) == fed[index] - len(sampled)
            run.passes.append(self._trace(run, (look[0], look[2]), sampled))
            self.after_sampling(run, output.sampled_token_ids[index].tolist(), sampled)
            run.broken += int(output.num_nans[index])
            self._emit(run, sampled)
        for index, run in enumerate(prefills, len(canvases)):
            run.prefilled = True
            run.broken += int(output.num_nans[index])
        assert not output.num_sampled[len(canvases) : len(runs)].any()
        return output

    def width(self, run: Run) -> int:
        """How many positions of its canvas a request is fed."""
        return self.canvas_length

    def before_sampling(self, canvases: list[Run], prefills: list[Run]) -> None:
        """Nothing here: what else a runner hands to the sampler."""

    def after_sampling(self, run: Run, canvas: list[int], emitted: list[int]) -> None:
        """Nothing here: what else a runner keeps of a result."""

    def batch(
        self, canvases: list[Run], fed: list[int], prefills: list[Run]
    ) -> InputBatch:
        """What vLLM's runner would hand to the sampler."""
        runs = canvases + prefills
        texts = [len(run.prompt + run.output) for run in prefills]
        slots = np.array([run.slot for run in runs], dtype=np.int64)
        drafts = np.array(fed + [0] * len(prefills), dtype=np.int32)
        spans = np.array(fed + texts, dtype=np.int32)
        bounds = np.concatenate([[0], spans.cumsum()]).astype(np.int32)
        logit_bounds = np.concatenate([[0], drafts.cumsum()]).astype(np.int32)
        computed = self.states.start_N[_ids(slots)].cpu().numpy().astype(np.int32)
        computed[len(canvases) :] = 0
        prefilling = np.array([False] * len(canvases) + [True] * len(prefills))
        local = [position for n in fed for position in range(n)]
        total, tokens = int(drafts.sum()), int(spans.sum())
        seq_lens = torch.from_numpy(computed + spans)
        self.seq_lens[: len(runs)] = seq_lens
        return InputBatch(
            req_ids=[run.req_id for run in runs],
            num_reqs=len(runs),
            num_reqs_after_padding=len(runs),
            idx_mapping=_ids(slots),
            idx_mapping_np=slots,
            expanded_idx_mapping=_ids(np.repeat(slots, drafts)),
            expanded_local_pos=torch.tensor(local, dtype=torch.int32, device=DEVICE),
            num_scheduled_tokens=spans,
            num_tokens=tokens,
            num_tokens_after_padding=tokens,
            num_draft_tokens=total,
            num_draft_tokens_per_req=drafts if canvases else None,
            query_start_loc=torch.from_numpy(bounds).to(DEVICE),
            query_start_loc_np=bounds,
            seq_lens=self.seq_lens[: len(runs)],
            seq_lens_cpu_upper_bound=seq_lens,
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=np.array([len(run.prompt + run.output) for run in runs]),
            num_computed_prefill_tokens_np=computed,
            is_prefilling_np=prefilling,
            has_prefill=bool(prefills),
            decode_graph_eligible=not prefills,
            input_ids=torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
            positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            is_padding=torch.zeros(tokens, dtype=torch.bool, device=DEVICE),
            logits_indices=torch.arange(total, device=DEVICE),
            cu_num_logits=torch.from_numpy(logit_bounds).to(DEVICE),
            cu_num_logits_np=logit_bounds,
            has_structured_output_reqs=False,
            prompt_lens=None,
        )

    def _limit(self, run: Run) -> int:
        assert run.params.max_tokens is not None
        length, prompt = self._block_length(run), len(run.prompt)
        whole = -(-run.params.max_tokens // length) * length
        return min(prompt + whole, self.model_config.max_model_len)

    def _block_length(self, run: Run) -> int:
        return int(self.states.requests.block_length.np[run.slot])

    def _rows(self, run: Run, fed: int) -> Iterable[np.ndarray]:
        """Logits of a canvas; NaN where no open block can be, for nobody may read that."""
        start, open_blocks, canvas, _ = self._look(run)
        length, prompt, limit = (
            self._block_length(run),
            len(run.prompt),
            self._limit(run),
        )
        text = run.prompt + run.output + canvas
        for query in range(start, start + fed):
            if query >= min(start + (open_blocks + 1) * length, limit):
                yield np.full(self.vocab, np.nan, dtype=np.float32)
                continue
            yield run.script(
                text[: visible(query, prompt, length, limit)], query + self.shift
            )

    def _look(self, run: Run) -> tuple[int, int, list[int], list[bool]]:
        states, slot = self.states, run.slot
        return (
            int(states.start_N[slot]),
            int(states.open_N[slot]),
            states.canvas_NC[slot].tolist(),
            states.full_NS[slot].tolist(),
        )

    def _trace(self, run: Run, old: tuple[int, list[int]], sampled: list[int]) -> Pass:
        old_start, fed = old
        start, num_open, new, full = self._look(run)
        commit, length = start - old_start, self._block_length(run)
        blocks = num_open + -(-commit // length)
        accepted = [
            (old_start + i, new[i - commit])
            for i in range(commit, len(fed))
            if fed[i] == self.mask and new[i - commit] != self.mask
        ]
        flags = "".join("F" if flag else "s" for flag in full[:num_open])
        hi = min(old_start + blocks * length, self._limit(run))
        saw_stop = bool(self.states.saw_stop_N[run.slot])
        return Pass(old_start, hi, commit, flags, accepted, saw_stop, sampled)

    def _emit(self, run: Run, sampled: list[int]) -> None:
        """What vLLM's runner and scheduler do with emitted tokens."""
        assert self.mask not in sampled
        first = len(run.prompt + run.output)
        run.output += sampled
        tokens = self.req_states.all_token_ids.gpu[run.slot]
        tokens[first : first + len(sampled)] = _ids(sampled).to(tokens.dtype)
        stops = {run.params.eos_token_id, *(run.params.stop_token_ids or ())}
        ends = [i for i, token in enumerate(run.output) if token in stops]
        assert not ends or ends[0] == len(run.output) - 1, (
            "tokens emitted behind a stop token"
        )
        assert len(run.prompt + run.output) <= run.end, "more tokens than asked for"
        if ends or len(run.prompt + run.output) == run.end:
            assert bool(self.states.ended_N[run.slot])
            run.done = True
            self.finish(run)


def _ids(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64), device=DEVICE)
