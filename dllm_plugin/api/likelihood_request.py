"""Read the body of a likelihood call: limits, texts to tokens, and the forwards that it needs."""

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr

from dllm_plugin.api.likelihood import METHODS, Sample
from dllm_plugin.api.scorer import Text
from dllm_plugin.config.validation import shown

MOST_SAMPLES, MOST_FORWARDS = 1024, 4096
SAMPLES, SEED = 128, 0  # of monte_carlo, where the call names none
MOST_SEED = 2**63 - 1


class Pair(BaseModel):
    """Hold a text whose end is scored: both parts are texts, or both are token ids."""

    model_config = ConfigDict(extra="forbid")
    context: StrictStr | list[StrictInt] = ""
    continuation: StrictStr | list[StrictInt]


class LikelihoodRequest(BaseModel):
    """Hold the body of a call."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    pairs: list[Pair]
    method: StrictStr = "monte_carlo"
    samples: StrictInt | None = None
    seed: StrictInt | None = None
    greedy: StrictBool = False


def check_limits(request: LikelihoodRequest) -> None:
    """Raise ValueError naming the first field that is out of range or without effect."""
    if not request.pairs:
        raise ValueError("pairs must hold at least one pair of context and continuation.")
    check_forwards(len(request.pairs))  # before their texts are read
    if request.method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"method must be one of {known}, got {shown(request.method)}.")
    for name, lowest, most in (("samples", 1, MOST_SAMPLES), ("seed", 0, MOST_SEED)):
        value = getattr(request, name)
        if value is None:
            continue
        if request.method != "monte_carlo":
            raise ValueError(
                f"{name} has no effect with method {request.method}, which draws nothing: leave "
                "it out."
            )
        if not lowest <= value <= most:
            raise ValueError(f"{name} must be from {lowest} to {most}, got {shown(value)}.")


def check_forwards(needed: int) -> None:
    """Raise ValueError for more forwards than one call may take."""
    if needed > MOST_FORWARDS:
        raise ValueError(
            f"This call needs {needed} forwards, at most {MOST_FORWARDS} are allowed: fewer "
            "samples or pairs."
        )


def plan(request: LikelihoodRequest, texts: list[Text]) -> list[list[Sample]]:
    """Return the samples of each text. Raises ValueError for more forwards than a call may take."""
    count = SAMPLES if request.samples is None else request.samples
    seed = SEED if request.seed is None else request.seed
    lengths = [len(text.continuation) for text in texts]
    if request.method == "monte_carlo":
        needed = sum(1 if length == 1 else count for length in lengths)
    else:
        needed = sum(lengths)
    needed += sum(lengths) if request.greedy else 0
    check_forwards(needed)
    return [METHODS[request.method](length, count, seed) for length in lengths]


async def read_pairs(request: LikelihoodRequest, renderer: Any) -> list[Text]:
    """Return the token ids of all pairs. Raises ValueError naming the pair that has none."""
    check_limits(request)
    texts = []
    for place, pair in enumerate(request.pairs):
        context, continuation = pair.context or type(pair.continuation)(), pair.continuation
        if isinstance(context, str) and isinstance(continuation, str):
            text = await _tokenized(context, continuation, renderer)
        elif isinstance(context, list) and isinstance(continuation, list):
            text = Text(context, continuation)
        else:
            raise ValueError(f"pairs[{place}] mixes text and token ids: both must be of one kind.")
        if not text.continuation:
            raise ValueError(f"pairs[{place}].continuation holds no token.")
        texts.append(text if text.context else text._replace(context=_beginning(renderer, place)))
    return texts


async def _tokenized(context: str, continuation: str, renderer: Any) -> Text:
    """Return the tokens of a text, cut where its context ends.

    Space at a context's end goes with the word behind it, as tokenizers join them.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    whole = await _ids(kept + continuation, renderer)
    before = await _ids(kept, renderer)
    return Text(before, whole[len(before) :])


async def _ids(text: str, renderer: Any) -> list[int]:
    params = renderer.default_cmpl_tok_params
    prompt = await renderer.tokenize_prompt_async({"prompt": text}, params)
    return list(prompt["prompt_token_ids"])


def _beginning(renderer: Any, place: int) -> list[int]:
    """Return what stands before a text without context."""
    for token in (renderer.get_bos_token_id(), renderer.get_eos_token_id()):
        if token is not None:
            return [token]
    raise ValueError(f"pairs[{place}].context is empty, and the tokenizer has no token to begin.")
