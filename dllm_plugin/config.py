"""DecodeConfig and the per-architecture hook into vLLM's configuration."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_plugin.models import FAMILIES, Family

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

STRATEGIES = ("auto", "d2f", "block_diffusion")
POLICIES = ("auto", "low_confidence", "threshold", "factor", "entropy", "topk_margin", "random")
KV_CACHE_LAYOUTS = ("auto", "unified")
PLANNED = {
    "strategy": ("semi_autoregressive", "prefix_cache", "dual_cache"),
    "policy": ("origin",),
    "kv_cache_layout": ("distinct",),
}
D2F_POLICIES = ("threshold", "entropy", "topk_margin")
MAX_STEPS = 4096
TOKENIZER_MODE = "dllm"
BLOCK_THRESHOLDS = ("block_add_threshold", "decoded_token_threshold")
REQUEST_PREFIX = "dllm_"
REQUEST_FIELDS = (
    "policy",
    "threshold",
    "factor",
    "steps",
    "eps",
    "block_length",
    "max_active_blocks",
    "block_add_threshold",
    "decoded_token_threshold",
)


@dataclass(frozen=True)
class DecodeConfig:
    """How diffusion models decode: ``additional_config={"dllm": {...}}``.

    strategy                 what is computed per step; `auto` takes d2f with an adapter
    policy                   which masked positions take their proposal; `auto`: threshold
    block_length             positions of a block (D2F: a free inference knob)
    canvas_length            positions fed per request and step; None: see `resolve`
    max_active_blocks        open blocks per request; None: what fits the canvas, at least 8
    steps                    denoising steps per block for schedule policies; None: block_length
    threshold                confidence above which a position is unmasked (tau_conf)
    factor                   Fast-dLLM's factor
    block_add_threshold      decided share of the last block that opens the next (tau_add)
    decoded_token_threshold  decided share that fully activates the next block (tau_act)
    kv_cache_layout          `unified` is vLLM's own layout
    lora_path                D2F adapter (PEFT folder) merged into the weights at load
    eps                      end of Dream's time schedule
    alg_temp, cfg_scale, logits_eos_inf, confidence_eos_eot_inf
                             options of strategies that are not implemented yet: refused when set

    The last four fields are filled by `resolve`, never by users.
    """

    strategy: str = "auto"
    policy: str = "auto"
    block_length: int = 32
    canvas_length: int | None = None
    max_active_blocks: int | None = None
    steps: int | None = None
    threshold: float = 0.9
    factor: float = 1.0
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    kv_cache_layout: str = "auto"
    lora_path: str | None = None
    eps: float = 1e-3
    alg_temp: float | None = None
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    architecture: str = dataclasses.field(default="", metadata={"internal": True})
    mask_token_id: int = dataclasses.field(default=-1, metadata={"internal": True})
    turn_end_token_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"internal": True})
    reason: str = dataclasses.field(default="", metadata={"internal": True})

    @property
    def family(self) -> Family:
        """Facts about the served model's family."""
        return FAMILIES[self.architecture]

    @property
    def time_schedule(self) -> bool:
        """Whether `steps` are Dream's time steps instead of LLaDA's transfer quota."""
        return self.family.name == "dream"

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
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("policy", self.policy, POLICIES)
        _one_of("kv_cache_layout", self.kv_cache_layout, KV_CACHE_LAYOUTS)
        for name in ("block_length", "canvas_length", "max_active_blocks", "steps"):
            _whole_number(name, getattr(self, name), optional=name != "block_length")
        if self.steps is not None and self.steps > MAX_STEPS:
            raise ValueError(f"steps must be at most {MAX_STEPS}, got {self.steps}.")
        for name in ("threshold", "block_add_threshold", "decoded_token_threshold"):
            _number(name, getattr(self, name), 0.0, 1.0)
        _number("factor", self.factor, 0.0, None)
        _number("eps", self.eps, 0.0, 1.0)
        if self.lora_path is not None and not isinstance(self.lora_path, str):
            raise ValueError(f"lora_path must be a folder name, got {self.lora_path!r}.")
        later = {
            "alg_temp": None,
            "cfg_scale": 0.0,
            "logits_eos_inf": False,
            "confidence_eos_eot_inf": False,
        }
        for name, neutral in later.items():
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} belongs to full-attention decoding, which this version does not "
                    f"have; remove {name} or use the model's reference code."
                )

    def resolve(
        self,
        architecture: str,
        max_model_len: int,
        mask_token_id: int,
        turn_end_token_ids: tuple[int, ...] = (),
    ) -> "DecodeConfig":
        """Fill every open choice for a served model.

        Raises ValueError when the canvas does not fit the context or a policy does not fit the
        strategy.
        """
        strategy, reason = self.strategy, f"strategy {self.strategy!r} was asked for"
        if strategy == "auto":
            strategy = "d2f" if self.lora_path else "block_diffusion"
            reason = "a D2F adapter is given" if self.lora_path else "no D2F adapter is given"
        policy = "threshold" if self.policy == "auto" else self.policy
        _check_policy(strategy, policy)
        canvas = self.canvas_length
        if canvas is not None:
            if canvas > max_model_len:
                raise ValueError(
                    f"canvas_length {canvas} is longer than the context of {max_model_len} "
                    "tokens: lower canvas_length or raise max_model_len."
                )
        elif strategy == "block_diffusion":
            canvas = 2 * self.block_length
        elif self.max_active_blocks is not None:
            canvas = self.max_active_blocks * self.block_length
        else:
            canvas = max(128, 4 * self.block_length)
        canvas = min(canvas, max_model_len)
        _check_block_length(self.block_length, canvas)
        blocks = self.max_active_blocks or max(8, canvas // self.block_length)
        return dataclasses.replace(
            self,
            strategy=strategy,
            policy=policy,
            canvas_length=canvas,
            max_active_blocks=min(blocks, canvas),
            kv_cache_layout="unified",
            architecture=architecture,
            mask_token_id=mask_token_id,
            turn_end_token_ids=turn_end_token_ids,
            reason=reason,
        )

    def for_request(self, extra_args: Mapping[str, Any] | None) -> "DecodeConfig":
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
        if not fields:
            return self if self.steps else dataclasses.replace(self, steps=self.block_length)
        if fields.get("policy") == "auto":
            fields["policy"] = "threshold"
        request = dataclasses.replace(self, **fields)
        try:
            request.check()
            _check_policy(request.strategy, request.policy)
            assert self.canvas_length is not None and self.max_active_blocks is not None
            _check_block_length(request.block_length, self.canvas_length)
            if request.max_active_blocks is None or (
                request.max_active_blocks > self.max_active_blocks
            ):
                raise ValueError(
                    f"max_active_blocks {request.max_active_blocks} exceeds the engine's "
                    f"{self.max_active_blocks}: raise max_active_blocks in additional_config."
                )
            _check_effect(request, fields)
        except ValueError as error:
            raise ValueError(f"Request argument refused: {REQUEST_PREFIX}{error}") from None
        return dataclasses.replace(request, steps=request.steps or request.block_length)


def get_decode_config(vllm_config: "VllmConfig") -> DecodeConfig:
    """The resolved configuration that the hook stored in ``additional_config``."""
    resolved = vllm_config.additional_config["dllm"]  # type: ignore[index]
    return DecodeConfig(**resolved)


def register_config_hooks(architectures: Iterable[str]) -> None:
    """Enter our hook for each architecture into vLLM's map of model config hooks."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from dllm_plugin.engine_config import DiffusionConfigHook

    for architecture in architectures:
        MODELS_CONFIG_MAP[architecture] = DiffusionConfigHook


def register_tokenizer_mode() -> None:
    """Register our tokenizer mode: vLLM's HF tokenizer with our renderer. Idempotent."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        RENDERER_REGISTRY.register(TOKENIZER_MODE, "dllm_plugin.admission", "DiffusionRenderer")
    if TOKENIZER_MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")


def find_mask_token(model_config: "ModelConfig", family: Family) -> tuple[int, str]:
    """Id of the mask token and where it was found.

    Looked up in the HF config, then the tokenizer's mask_token, then the family's known token
    texts. Raises ValueError when none of them has it.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    configured = getattr(model_config.hf_config, "mask_token_id", None)
    if configured is not None:
        vocab_size = model_config.get_vocab_size()
        if not 0 <= configured < vocab_size:
            raise ValueError(
                f"mask_token_id {configured} in config.json lies outside the vocabulary of "
                f"{vocab_size} tokens: correct config.json."
            )
        return int(configured), "config.json"
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        for text in family.mask_tokens:
            if text in vocabulary:
                return int(vocabulary[text]), f"tokenizer token {text!r}"
    raise ValueError(
        "No mask token: config.json has no mask_token_id and the tokenizer has none of "
        f"{', '.join(family.mask_tokens)}; add mask_token_id to config.json or pass "
        "hf_overrides={'mask_token_id': ...}."
    )


def find_turn_ends(model_config: "ModelConfig", family: Family) -> tuple[int, ...]:
    """Ids of the family's end-of-turn tokens, which end a chat answer besides EOS."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return ()
    vocabulary = tokenizer.get_vocab()
    return tuple(vocabulary[text] for text in family.turn_end_tokens if text in vocabulary)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if isinstance(value, str) and value in choices:
        return
    if isinstance(value, str) and value in PLANNED.get(name, ()):
        raise ValueError(
            f"{name} {value!r} is not implemented in this version; use one of: "
            f"{', '.join(choices)}."
        )
    raise ValueError(f"{name} {value!r} is unknown; choose one of: {', '.join(choices)}.")


def _whole_number(name: str, value: Any, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _number(name: str, value: Any, low: float, high: float | None) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= low
    if not good or (high is not None and value > high):
        limits = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be a number {limits}, got {value!r}.")


def _check_policy(strategy: str, policy: str) -> None:
    if strategy == "d2f" and policy not in D2F_POLICIES:
        raise ValueError(
            f"policy {policy!r} has no meaning for strategy 'd2f', which accepts by confidence; "
            f"choose one of: {', '.join(D2F_POLICIES)}."
        )


def _check_block_length(block_length: int, canvas_length: int) -> None:
    if block_length > canvas_length:
        raise ValueError(
            f"block_length {block_length} is longer than the canvas of {canvas_length} "
            "positions: lower block_length or raise canvas_length in additional_config."
        )


def check_strategy_reads(config: DecodeConfig, given: Iterable[str]) -> None:
    """Refuse engine options that the resolved strategy or family can never read."""
    is_d2f = config.strategy == "d2f"
    unread = {"steps", "factor", "eps"} if is_d2f else {*BLOCK_THRESHOLDS}
    if not config.time_schedule:
        unread.add("eps")
    for name in given:
        if name in unread:
            raise ValueError(
                f"{name} has no effect with strategy {config.strategy!r} on "
                f"{config.architecture}: remove it or choose another strategy."
            )


def _check_effect(request: DecodeConfig, fields: Mapping[str, Any]) -> None:
    """Refuse numbers that the chosen strategy and policy never read."""
    is_d2f = request.strategy == "d2f"
    by_schedule = not is_d2f and request.policy not in ("threshold", "factor")
    read = {
        "threshold": is_d2f or request.policy == "threshold",
        "factor": request.policy == "factor",
        "steps": by_schedule,
        "eps": by_schedule and request.time_schedule,
        "max_active_blocks": is_d2f,
        "block_add_threshold": is_d2f,
        "decoded_token_threshold": is_d2f,
    }
    for name in fields:
        if not read.get(name, True):
            raise ValueError(
                f"{name} has no effect with strategy {request.strategy!r} and policy "
                f"{request.policy!r}: remove it or choose another policy."
            )
