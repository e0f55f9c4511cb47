"""DecodeConfig: the options, their limits, and what `auto` becomes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_plugin.config.validation import (
    check_block_cache,
    check_block_length,
    check_commit_alone,
    check_one_block,
    check_policy,
    check_steps,
    check_values,
)
from dllm_plugin.decoding.choices import (
    BLOCK_DIFFUSION,
    D2F,
    DUAL_CACHE,
    FULL_ATTENTION,
    JOINT,
    OFF,
    SEMI_AUTOREGRESSIVE,
    default_policy,
    options_of,
    options_read,
    strategies_of,
)
from dllm_plugin.decoding.families import FAMILIES, Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_BLOCK = 32
DEFAULT_CANVAS = 256  # of full attention: what one refresh recomputes behind the prompt
PLAIN_REASON = (
    "no adapter is given: full attention with KV reuse; the authors' own loop is strategy "
    "semi_autoregressive"
)
TOKENIZER_MODE = "dllm"
REQUEST_PREFIX = "dllm_"
REQUEST_FIELDS = (
    "policy",
    "threshold",
    "factor",
    "steps",
    "eps",
    "alg_temp",
    "top_p",
    "top_k",
    "cfg_scale",
    "logits_eos_inf",
    "confidence_eos_eot_inf",
    "block_length",
    "max_active_blocks",
    "block_add_threshold",
    "decoded_token_threshold",
    "editing_threshold",
    "max_post_steps",
    "num_to_transfer",
    "sub_block_length",
    "use_block_cache",
)
JOINT_THRESHOLD = 0.7  # LLaDA2.1's quality mode, with editing_threshold 0.5


@dataclass(frozen=True)
class DecodeConfig:
    """How diffusion models decode: ``additional_config={"dllm": {...}}``.

    strategy                 what is computed per step; `auto` takes block_diffusion on an absolute
                             grid, d2f with an adapter, else dual_cache
    policy                   which masked positions take their proposal; `auto`: threshold, in the
                             authors' own loop (semi_autoregressive) theirs, for checkpoints trained
                             to edit joint_threshold
    block_length             positions of a block (D2F: a free inference knob); None: what the
                             checkpoint was trained with, or 32; for semi_autoregressive on Dream
                             the whole canvas
    canvas_length            positions fed per request and step, for full attention the most that
                             a refresh recomputes behind the prompt; None: see `resolve`
    max_active_blocks        D2F: open blocks per request; None: what fits the canvas, at least 8.
                             block_diffusion: blocks that are denoised at once; None: 1
    commit_alone_from        block_diffusion: so many running requests are fed a block each, and
                             finished blocks commit in a pass of their own; 0: never; None: where
                             it pays (:func:`dllm_plugin.config.resolution.fewest_alone`)
    steps                    denoising steps per block; None: block_length
    threshold                confidence from which a position is unmasked (tau_conf)
    factor                   Fast-dLLM's factor
    block_add_threshold      decided share of the last block that opens the next (tau_add)
    decoded_token_threshold  decided share that fully activates the next block (tau_act)
    kv_cache_layout          `unified` is vLLM's own; `distinct` ours, with fused span attention
    compile_step             GPUs: compile what a step plans and decides around its logits; None:
                             where vLLM compiles the model
    vocab_parallel           tensor parallelism: ranks exchange results per row, not the logits;
                             None: wherever it can
    lora_path                D2F adapter (PEFT folder) merged into the weights at load
    eps                      end of Dream's time schedule
    alg_temp                 Dream: temperature of the choice of positions; None or 0: the best
    top_p, top_k             Dream: filters at temperature 0, where vLLM drops its own
    cfg_scale                LLaDA: classifier-free guidance; 0 is off
    logits_eos_inf           LLaDA: never propose EOS
    confidence_eos_eot_inf   LLaDA: no confidence in EOS and end of turn
    editing_threshold        joint_threshold: confidence above which a token is replaced
    max_post_steps           joint_threshold: most steps of a block without masks that may edit
    num_to_transfer          joint_threshold: how many positions a step unmasks at least
    sub_block_length         Fast-dLLM v2: positions decoded at a time in a block; None: 8
    use_block_cache          Fast-dLLM v2: trust the KV of other sub-blocks within a block

    The last six fields are filled by `resolve`, never by users.
    """

    strategy: str = "auto"
    policy: str = "auto"
    block_length: int | None = None
    canvas_length: int | None = None
    max_active_blocks: int | None = None
    commit_alone_from: int | None = None
    steps: int | None = None
    threshold: float | None = None
    factor: float = 1.0
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    kv_cache_layout: str = "auto"
    compile_step: bool | None = None
    vocab_parallel: bool | None = None
    lora_path: str | None = None
    eps: float = 1e-3
    alg_temp: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    editing_threshold: float = 0.5
    max_post_steps: int = 16
    num_to_transfer: int = 1
    sub_block_length: int | None = None
    use_block_cache: bool = False
    architecture: str = dataclasses.field(default="", metadata={"internal": True})
    mask_token_id: int = dataclasses.field(default=-1, metadata={"internal": True})
    turn_end_token_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"internal": True})
    reason: str = dataclasses.field(default="", metadata={"internal": True})
    whole_canvas: bool = dataclasses.field(default=False, metadata={"internal": True})
    edits: bool = dataclasses.field(default=False, metadata={"internal": True})

    @property
    def family(self) -> Family:
        """Facts about the served model's family."""
        return FAMILIES[self.architecture]

    @property
    def time_schedule(self) -> bool:
        """Whether `steps` are Dream's time steps instead of LLaDA's transfer quota."""
        return self.family.name == "dream"

    @property
    def full_attention(self) -> bool:
        """Whether a refresh recomputes everything, at the latest when a block is done."""
        return self.strategy in FULL_ATTENTION

    @property
    def leads_with_one(self) -> bool:
        """Whether a refresh decides the block's first position alone (Fast-dLLM on Dream)."""
        return self.family.logits_shift and self.strategy in FULL_ATTENTION[1:]

    @property
    def commits_alone(self) -> bool:
        """Whether a block begins with a token that only the commit pass before it predicts.

        Fast-dLLM v2's loop; several blocks at once leave it for the one of the other families.
        """
        family = self.family
        return family.absolute_grid and family.logits_shift and self.max_active_blocks == 1

    @property
    def feeds_ahead(self) -> bool:
        """Whether a step feeds the one block that is denoised and masks behind it."""
        assert self.canvas_length is not None and self.block_length is not None
        one = self.strategy == BLOCK_DIFFUSION and self.max_active_blocks == 1
        room = self.canvas_length >= 2 * self.block_length
        return one and room and not self.commits_alone

    @property
    def block_slots(self) -> int:
        """Most blocks of a request that a step looks at."""
        assert self.canvas_length is not None and self.max_active_blocks is not None
        if self.strategy != BLOCK_DIFFUSION or self.commits_alone:
            return self.max_active_blocks
        # A block that is stored rides along with those that are denoised.
        return min(self.max_active_blocks + 1, self.canvas_length)

    @classmethod
    def from_user(cls, given: Mapping[str, Any]) -> "DecodeConfig":
        """Check user keys and values. Raises ValueError with one sentence."""
        known = {f.name for f in dataclasses.fields(cls) if not f.metadata.get("internal")}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"Unknown dllm option {unknown[0]!r}; known options: {', '.join(sorted(known))}."
            )
        config = cls(**given)
        config.check()
        return config

    def check(self) -> None:
        """Raise ValueError naming the first option that is out of range."""
        check_values(self)

    def resolve(
        self,
        architecture: str,
        max_model_len: int,
        mask_token_id: int,
        turn_end_token_ids: tuple[int, ...] = (),
        block_length: int | None = None,
        edits: bool = False,
    ) -> "DecodeConfig":
        """Fill every open choice for a served model.

        `block_length` is what it was trained with, `edits` whether it was trained to edit.

        Raises ValueError when the canvas does not fit the context or a policy does not fit the
        strategy.
        """
        family = FAMILIES[architecture]
        strategy, reason = self._choose_strategy(family)
        policy = self.policy
        if policy == "auto":
            policy = default_policy(strategy, family, edits)
        check_policy(strategy, policy, family)
        # Dream's authors decode the whole text as one block.
        whole = self.block_length is None and strategy == SEMI_AUTOREGRESSIVE
        whole = whole and family.name == "dream"
        block = self.block_length or block_length or DEFAULT_BLOCK
        canvas = self._choose_canvas(strategy, family, block, max_model_len)
        if whole or self.block_length is None and strategy in FULL_ATTENTION:
            block = canvas if whole else min(block, canvas)
        check_block_length(block, canvas)
        default_threshold = JOINT_THRESHOLD if policy == JOINT else family.threshold
        blocks = self.max_active_blocks or max(8, canvas // block)
        if strategy == BLOCK_DIFFUSION:
            blocks = self.max_active_blocks or 1
        return dataclasses.replace(
            self,
            strategy=strategy,
            policy=policy,
            block_length=block,
            canvas_length=canvas,
            max_active_blocks=1 if strategy in FULL_ATTENTION else min(blocks, canvas),
            threshold=self.threshold if self.threshold is not None else default_threshold,
            sub_block_length=self.sub_block_length or family.sub_block_length,
            kv_cache_layout="distinct" if self.kv_cache_layout == "distinct" else "unified",
            architecture=architecture,
            mask_token_id=mask_token_id,
            turn_end_token_ids=turn_end_token_ids,
            reason=reason,
            whole_canvas=whole,
            edits=edits,
        )

    def _choose_canvas(self, strategy: str, family: Family, block: int, max_model_len: int) -> int:
        """Positions of a canvas; ValueError if one was asked for that the context cannot hold."""
        if self.canvas_length is not None:
            if self.canvas_length > max_model_len:
                raise ValueError(
                    f"canvas_length {self.canvas_length} is longer than the context of "
                    f"{max_model_len} tokens: lower canvas_length or raise max_model_len."
                )
            active = self.max_active_blocks or 1
            if strategy == BLOCK_DIFFUSION and active > 1 and active * block > self.canvas_length:
                raise ValueError(
                    f"max_active_blocks {active} of {block} positions do not fit canvas_length "
                    f"{self.canvas_length}: lower max_active_blocks or raise canvas_length."
                )
            return self.canvas_length
        if strategy in FULL_ATTENTION:
            canvas = max(DEFAULT_CANVAS, block)
        elif strategy == BLOCK_DIFFUSION:
            active = self.max_active_blocks or 1
            # The block that is stored rides along, where it may.
            alone = active == 1 and family.absolute_grid and family.logits_shift
            canvas = block if alone else (active + 1) * block
        elif self.max_active_blocks is not None:
            canvas = self.max_active_blocks * block
        else:
            canvas = max(128, 4 * block)
        return min(canvas, max_model_len)

    def _choose_strategy(self, family: Family) -> tuple[str, str]:
        """The strategy and why; ValueError if it does not fit the family."""
        known = strategies_of(family)
        if self.strategy == "auto" and family.absolute_grid:
            return BLOCK_DIFFUSION, f"{family.name} models are trained block by block"
        if self.strategy == "auto":
            return (D2F, "a D2F adapter is given") if self.lora_path else (DUAL_CACHE, PLAIN_REASON)
        if self.strategy not in known:
            raise ValueError(
                f"strategy {self.strategy!r} does not fit {family.name} models, which attend "
                f"causally from block to block; choose one of: {', '.join(known)}."
            )
        return self.strategy, f"strategy {self.strategy!r} was asked for"

    def for_request(
        self, extra_args: Mapping[str, Any] | None, max_tokens: int | None = None
    ) -> "DecodeConfig":
        """This configuration with a request's ``dllm_*`` extra_args applied.

        Raises ValueError naming the argument that is unknown, out of range, or without effect
        under the request's strategy and policy.
        """
        given = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(REQUEST_PREFIX)}
        fields = {key.removeprefix(REQUEST_PREFIX): value for key, value in given.items()}
        unknown = sorted(set(fields) - set(REQUEST_FIELDS))
        if unknown:
            raise ValueError(
                f"Unknown request argument {REQUEST_PREFIX + unknown[0]!r}; known: "
                f"{', '.join(REQUEST_PREFIX + name for name in REQUEST_FIELDS)}."
            )
        if fields.get("policy") == "auto":
            fields["policy"] = default_policy(self.strategy, self.family, self.edits)
        request = dataclasses.replace(self, **fields)
        try:
            if fields:
                self._check_request(request, fields)
        except ValueError as error:
            raise ValueError(f"Request argument refused: {REQUEST_PREFIX}{error}") from None
        block, canvas = request.block_length, request.canvas_length
        assert block is not None and canvas is not None
        if self.whole_canvas and "block_length" not in fields:
            block = min(max_tokens or canvas, canvas)
        default = block
        if request.strategy == SEMI_AUTOREGRESSIVE and request.time_schedule:
            # Dream's loop by threshold releases positions step by step; one step is all at once.
            default = 1 if request.policy == "threshold" else block
        active = request.max_active_blocks
        if request.strategy == BLOCK_DIFFUSION and "max_active_blocks" not in options_read(
            request.strategy, request.policy, self.family
        ):
            active = 1
        return dataclasses.replace(
            request,
            block_length=block,
            steps=request.steps or default,
            max_active_blocks=active,
        )

    def _check_request(self, request: "DecodeConfig", fields: Mapping[str, Any]) -> None:
        request.check()
        check_policy(request.strategy, request.policy, self.family)
        assert self.canvas_length is not None and self.max_active_blocks is not None
        if request.block_length is None:
            raise ValueError("block_length must be a whole number of at least 1, got None.")
        if request.threshold is None:
            raise ValueError("threshold must be a number between 0.0 and 1.0, got None.")
        if request.sub_block_length is None and self.sub_block_length is not None:
            raise ValueError("sub_block_length must be a whole number of at least 1, got None.")
        check_block_length(request.block_length, self.canvas_length)
        if request.max_active_blocks is None or (
            request.max_active_blocks > self.max_active_blocks
        ):
            raise ValueError(
                f"max_active_blocks {request.max_active_blocks} exceeds the engine's "
                f"{self.max_active_blocks}: raise max_active_blocks in additional_config."
            )
        read = options_read(request.strategy, request.policy, self.family)
        for name, value in fields.items():
            if name not in read and value not in OFF.get(name, ()):
                raise ValueError(
                    f"{name} has no effect with strategy {request.strategy!r} and policy "
                    f"{request.policy!r} on {self.architecture}: remove it or choose another "
                    "policy."
                )
        check_steps(request)
        check_one_block(request, fields)
        # Whether blocks commit alone is the engine's choice.
        check_block_cache(dataclasses.replace(self, use_block_cache=request.use_block_cache))


def get_decode_config(vllm_config: "VllmConfig") -> DecodeConfig:
    """The resolved configuration that the hook stored in ``additional_config``."""
    resolved = vllm_config.additional_config["dllm"]  # type: ignore[index]
    return DecodeConfig(**resolved)


def check_strategy_reads(config: DecodeConfig, given: Mapping[str, Any]) -> None:
    """Refuse engine options that the resolved strategy or family can never read."""
    read = options_of(config.strategy, config.family)
    for name in REQUEST_FIELDS:
        if name in given and name not in read and given[name] not in OFF.get(name, ()):
            raise ValueError(
                f"{name} has no effect with strategy {config.strategy!r} on "
                f"{config.architecture}: remove it or choose another strategy."
            )
    check_steps(config)
    check_one_block(config, given)
    check_block_cache(config)
    check_commit_alone(config)
