"""Store what an engine decodes with: :mod:`dllm_plugin.config.resolution` fills in open options."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from dllm_plugin import __version__
from dllm_plugin.decoding.families import FAMILIES, Family
from dllm_plugin.decoding.full_attention import NO_TEMPLATE, limit
from dllm_plugin.decoding.method import Method
from dllm_plugin.decoding.methods import METHODS, floating
from dllm_plugin.decoding.step_costs import reads_of
from dllm_plugin.decoding.widths import doubled

from .request.arguments import RequestArguments, Template

CHUNK_ROWS = 256  # rows at most of which float32 copies are made at once
TOKENIZER_MODE = "dllm"  # vLLM's tokenizer of Hugging Face with our renderer


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Store the resolved options of an engine, as in :mod:`dllm_plugin.config.options`.

    defaults        what a request decodes with that asks for nothing
    steps           of every block, if the user has set them; None: as many as it has positions
    reason          why this strategy was chosen
    whole_canvas    a request's block is as long as its answer
    edits           the checkpoint was trained to replace tokens
    hidden_token_id the pad token, if no text may hold it: it ends an answer
    structure_token_ids  the tokens that delete and insert, if the model's blocks do that
    reserved        pad and EOS token, if the last position of an answer holds one of them
    no_grammars     why requests with a grammar are refused; empty: they are not
    no_traces       why requests with a trace are refused; empty: they are not
    stages          of the pipeline among which the layers are divided
    rows_at_once    logits rows of which float32 copies are made at once
    """

    architecture: str
    strategy: str
    defaults: RequestArguments
    steps: int | None
    canvas_length: int
    commit_alone_from: int
    adaptive: str
    min_window: int
    max_window: int
    kv_cache_layout: str
    compile_step: bool
    vocab_parallel: bool
    lora_path: str | None
    draft_adapter: str | None
    head_quantization: str
    merged_updates: bool
    mask_token_id: int
    turn_end_token_ids: tuple[int, ...]
    reason: str
    whole_canvas: bool
    edits: bool
    hidden_token_id: int | None = None
    structure_token_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    no_grammars: str = ""
    no_traces: str = ""
    stages: int = 1
    rows_at_once: int = CHUNK_ROWS

    @cached_property
    def family(self) -> Family:
        """Return the facts about the served model's family."""
        return FAMILIES[self.architecture]

    @cached_property
    def method(self) -> Method:
        """Return how the strategy decodes this family."""
        method = METHODS[self.strategy, self.family.name]
        return method if self.adaptive == "off" else floating(method)

    @property
    def policy(self) -> str:
        """Return the policy of requests that name none."""
        return self.defaults.policy

    @property
    def block_length(self) -> int:
        """Return the positions of a block, unless a request sets its own length."""
        return self.defaults.block_length

    @property
    def longest_block(self) -> int:
        """Return the most positions of a block; a causal commit decides one more."""
        if self.method.causal_rows:
            return self.canvas_length // 2
        return self.canvas_length - self.method.causal_commit

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Return how many rows a step may compute for drafts by load; empty: one number."""
        if self.method.drafted is None:
            return ()
        rows = self.method.rows or int
        return tuple(rows(length) for length in doubled(self.block_length))

    @property
    def context_reads(self) -> float:
        """Return how often a canvas reads its context: once if it is one sequence."""
        return 1.0 if self.draft_rows else reads_of(self.kv_cache_layout)

    @property
    def max_active_blocks(self) -> int:
        """Return the most blocks of a request that are denoised at once."""
        return self.defaults.max_active_blocks

    @property
    def dedicated_commit(self) -> bool:
        """Return whether finished blocks commit in a forward of their own, see `Method`."""
        return self.method.dedicated_commit and self.max_active_blocks == 1

    @property
    def prompt_has_blocks(self) -> bool:
        """Return whether blocks divide the prompt too."""
        return self.family.absolute_grid or self.method.splits_prompt

    def origin(self, prompt_len: int, block_length: int) -> int:
        """Return the absolute position from which blocks of a request are counted."""
        if self.family.absolute_grid:
            return 0
        return prompt_len % block_length if self.method.splits_prompt else prompt_len

    @property
    def restarts_blocks(self) -> bool:
        """Return whether a request that was preempted decodes its open blocks again."""
        return self.method.full_attention or self.dedicated_commit

    @property
    def computes_next_block(self) -> bool:
        """Return whether a step computes the block being denoised and, as masks, the next block."""
        one = self.method.next_block and self.max_active_blocks == 1
        return (
            one
            and self.canvas_length >= 2 * self.block_length
            and not self.dedicated_commit
        )

    @property
    def block_slots(self) -> int:
        """Return the most blocks of a request that a step looks at."""
        if self.method.floats:
            # The decided run, and the parts of the window after it.
            return 1 - -self.canvas_length // self.block_length
        if not self.method.next_block or self.dedicated_commit:
            return self.max_active_blocks
        # The block that commits is computed in the same forward.
        return min(self.max_active_blocks + 1, self.canvas_length)

    @property
    def default_policy(self) -> str:
        """Return what the policy `auto` becomes."""
        return self.method.edited_policy if self.edits else self.method.default_policy

    @property
    def moves_tokens(self) -> str:
        """Return why what is asked of single positions is refused; empty if it is not."""
        if not self.method.inserts:
            return ""
        return (
            f"is not supported by {self.family.title}, whose blocks delete and insert tokens "
            "while they are decoded"
        )

    @property
    def no_prompt_logprobs(self) -> str:
        """Return why log-probabilities of prompts are refused; empty if they are not."""
        if self.method.accept is None:
            return (
                "rows of prompts do not become logits; with LLaDA and Dream, to score a text, use "
                "/v1/likelihood or examples/lm_eval_model.py"
            )
        if self.vocab_parallel:
            return "each rank has its own columns of the logits (vocab_parallel)"
        return ""

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields: functions of a method do not pickle."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data, which vLLM hashes, pickles and hands to every process."""
        return dataclasses.asdict(self)


def layout_of(
    asked: RequestArguments, start: int, end: int, template: Template | None = None
) -> tuple[int, ...]:
    """Return the fields of :class:`dllm_plugin.decoding.full_attention.Layout` of one request.

    Args:
        start: absolute position from which blocks are counted.
        end: absolute position where the text ends at most.
    """
    return (
        start,
        end,
        asked.block_length,
        asked.full_refresh_every,
        limit(asked.refresh_before),
        limit(asked.suffix_window),
        NO_TEMPLATE if template is None else template.tail,
    )


DEFAULTS = SamplingParams()


def has_grammar(params: SamplingParams) -> bool:
    """Return whether structured output is asked for."""
    asked = params.structured_outputs
    return asked is not None and not asked.all_constraints_none()


@dataclass(frozen=True)
class Case:
    """Store a request with its engine and its parameters of vLLM.

    asked   what the request decodes with; for options: the engine's defaults
    given   what was written, by name without ``dllm_``
    params  the request's parameters of vLLM; their defaults before admission
    """

    config: DecodeConfig
    asked: RequestArguments
    given: Mapping[str, Any]
    params: SamplingParams = DEFAULTS

    @property
    def has_grammar(self) -> bool:
        """Return whether structured output is asked for."""
        return has_grammar(self.params)

    @property
    def edits(self) -> bool:
        """Return whether the policy may replace tokens that were decided."""
        policy = self.config.method.policies[self.asked.policy]
        return "editing_threshold" in policy.reads

    def is_set(self, parameter: str) -> bool:
        """Return whether a parameter of vLLM's has another value than its default."""
        value = getattr(self.params, parameter)
        return value is not None and bool(value != getattr(DEFAULTS, parameter))


def is_ours(vllm_config: VllmConfig) -> bool:
    """Return whether an engine decodes by diffusion; vLLM may have a class of its own."""
    given: Any = vllm_config.additional_config
    return isinstance(given, dict) and "dllm" in given


def get_decode_config(vllm_config: VllmConfig) -> DecodeConfig:
    """Return the resolved configuration that the hook stored in ``additional_config``."""
    resolved: dict[str, Any] = vllm_config.additional_config["dllm"]  # type: ignore[index]
    read = {
        "defaults": RequestArguments(**resolved["defaults"]),
        "turn_end_token_ids": tuple(resolved["turn_end_token_ids"]),
        "reserved": tuple(resolved["reserved"]),
        "structure_token_ids": tuple(resolved["structure_token_ids"]),
    }
    return DecodeConfig(**resolved | read)


def shared_options(vllm_config: VllmConfig, with_sizes: bool) -> dict[str, str]:
    """Return the options that replicas of a model must share, as text.

    `with_sizes`: of ranks, which compute a step together; some of vLLM's defaults follow from the
    memory of a node's GPUs.
    """
    additional: Any = vllm_config.additional_config
    resolved = additional["dllm"]
    ours = resolved | resolved["defaults"] | {"defaults": None, "rows_at_once": None}
    model, cache = vllm_config.model_config, vllm_config.cache_config
    theirs: dict[str, Any] = {
        "version": __version__,
        "dtype": model.dtype,
        "seed": model.seed,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
    }
    if with_sizes:
        scheduler = vllm_config.scheduler_config
        compilation = vllm_config.compilation_config
        theirs |= {
            "block_size": cache.block_size,
            "max_model_len": model.max_model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "cudagraph_mode": compilation.cudagraph_mode,
            "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
            "VLLM_PP_LAYER_PARTITION": envs.VLLM_PP_LAYER_PARTITION,
        }
    return {name: repr(value) for name, value in (theirs | ours).items()}


def refuse_unlike(
    who: str, options: dict[str, str], whom: str, expected: dict[str, str]
) -> None:
    """Raise ValueError for the first of `options` that is not as expected."""
    for name in expected | options:
        value, wanted = options.get(name), expected.get(name)
        if value != wanted:
            raise ValueError(
                f"{who} was started with {name} {value}, {whom} with {wanted}: start DiffuPlug "
                "with the same options and version on every node, this option too if their "
                "GPUs differ."
            )
