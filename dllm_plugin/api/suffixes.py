"""Turn a completion request with a suffix into one with a template."""

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from dllm_plugin.api.encoding import Encoder
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import FILL, TEMPLATE
from dllm_plugin.config.template import no_template
from dllm_plugin.config.validation import shown


def place_suffix(
    request: CompletionRequest, length: Any, encode: Encoder, config: DecodeConfig
) -> list[int]:
    """Put the suffix behind as many positions as are to be filled; return its tokens.

    Args:
        length: what the request asks for; None: `max_tokens`.
    Raises:
        ValueError: naming what the request cannot have beside a suffix.
    """
    suffix, request.suffix = request.suffix, None
    if not suffix:
        return []
    if refusal := no_template(config, "suffix"):
        raise ValueError(refusal)
    if not isinstance(request.prompt, str):
        raise ValueError("suffix needs one prompt of text.")
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise ValueError(f"{name} cannot be combined with suffix.")
    most = request.max_tokens
    length = most if length is None else length
    if most is None or type(length) is not int or not 1 <= length <= most:
        raise ValueError(
            f"lengths must be an integer from 1 to max_tokens {most}, got {shown(length)}."
        )
    tail = encode(suffix)
    if config.family.suffix_ends:
        tail = [*tail, encode.tokenizer.eos_token_id]
    starts = encode.first if request.add_special_tokens else encode
    request.prompt, request.max_tokens = starts(request.prompt), length
    xargs: dict[str, Any] = (request.vllm_xargs or {}) | {TEMPLATE: [FILL] * length + tail}
    request.vllm_xargs = xargs
    return tail
