"""Generate requests as the internet sends them: valid, wrong, hostile, and left while streaming."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

JSON = "application/json"
# Routes of the server's document that answer; its other ones are for operators.
ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/systemone",
    "/tokenize",
    "/detokenize",
    "/generative_scoring",
)
COMPLETIONS, CHAT = ROUTES[:2]
MODEL = "tiny"
MOST_TOKENS = 24  # an answer costs a few forwards
QUESTIONS = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. Omar sells 26 pencils at "
    "the market. How many pencils does Omar have now?",
    "Mia buys 3 boxes with 12 apples each and eats 5. How many apples are left?",
    "What?",
)


@dataclass(frozen=True)
class Request:
    """Bytes for a route, and how many chunks of the answer the client waits for."""

    path: str
    content: bytes
    media_type: str = JSON
    chunks: int | None = None  # None: it stays to the end

    def __str__(self) -> str:
        return f"POST {self.path} {self.content[:600]!r} (chunks: {self.chunks})"


def a_body(body: Any) -> bytes:
    """As JSON, with the NaN and Infinity that Python's own clients send."""
    return json.dumps(body).encode()


# What a client may set, each value valid on the bundled model.
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.5, 1.0, 2.0]),
    "top_p": st.sampled_from([0.1, 0.9, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 40, 10**6]),
    "min_p": st.sampled_from([0, 0.1, 1]),
    "seed": st.integers(-(2**63), 2**63 - 2),
    "n": st.integers(1, 3),
    "stop": st.sampled_from([None, [], "a", ["e", "\n"], ["####"]]),
    "stop_token_ids": st.lists(st.integers(0, 511), max_size=4),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "bad_words": st.lists(st.sampled_from(["apples", "has", " the", "7"]), max_size=3),
    "logit_bias": st.dictionaries(
        st.integers(0, 480).map(str), st.floats(-50, 50), max_size=3
    ),
    "allowed_token_ids": st.sampled_from([None, [5], list(range(40, 90))]),
    "logprobs": st.sampled_from([None, 0, 1, 5]),
    "skip_special_tokens": st.booleans(),
    "stream_options": st.sampled_from([None, {"include_usage": True}]),
    "priority": st.just(0),
    "user": st.text(max_size=8),
}
PLAIN_ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "dllm_threshold": st.floats(0, 1),
    "dllm_block_length": st.integers(1, 32),
    "dllm_policy": st.sampled_from(["threshold", "auto"]),
    "dllm_max_active_blocks": st.integers(1, 4),
    "dllm_block_add_threshold": st.floats(0, 1),
    "dllm_decoded_token_threshold": st.floats(0, 1),
}
# What nobody should send.
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0]
    ),
    st.sampled_from(
        [
            float("nan"),
            float("inf"),
            -float("inf"),
            5e-324,
            "",
            "auto",
            "\x00",
            "\ud800",
        ]
    ),
    st.sampled_from([[], {}, [[]], [None], {"": None}, [2**40], ["x" * 70]]),
    st.sampled_from(["x" * 5000, [0] * 2000]),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
        ),
        max_leaves=6,
    ),
)
OTHERS = """
prompt_logprobs presence_penalty frequency_penalty repetition_penalty response_format guided_json
structured_outputs use_beam_search best_of length_penalty echo suffix truncate_prompt_tokens
truncation_side prompt_embeds request_id session_id cache_salt kv_transfer_params tools tool_choice
ec_transfer_params repetition_detection thinking_token_budget logprob_token_ids return_token_ids
return_tokens_as_token_ids watermarking stream_interval include_stop_str_in_output chat_template
spaces_between_special_tokens add_special_tokens chat_template_kwargs documents reasoning_effort
continue_final_message add_generation_prompt top_logprobs max_completion_tokens model stream n
mm_processor_kwargs
"""
ARGUMENTS = """
dllm_steps dllm_policy dllm_threshold dllm_block_length dllm_cfg_scale dllm_top_p dllm_top_k
dllm_eps dllm_factor dllm_alg_temp dllm_max_active_blocks dllm_logits_eos_inf dllm_sub_block_length
dllm_use_block_cache dllm_max_post_steps dllm_speed dllm_lora_path other
"""
PROMPTS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(QUESTIONS),
    st.text(min_size=1, max_size=40),
    st.lists(st.integers(0, 483), min_size=1, max_size=80),
)
ODD_PROMPTS: st.SearchStrategy[Any] = st.one_of(
    ODD,
    st.sampled_from(
        [[486], [1, 486, 2], [512], [-1], [2**70], [[]], [[1, 2], []], ["a", "b"]]
    ),
    st.sampled_from(
        ["<|mdm_mask|>", "a" * 3000, [1] * 255, [1] * 256, [1] * 5000, "\x00" * 50]
    ),
)


@st.composite
def plain(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """The body of a request that is answered."""
    chosen = draw(st.sets(st.sampled_from(sorted(PLAIN)), max_size=4))
    body: dict[str, Any] = {name: draw(PLAIN[name]) for name in sorted(chosen)}
    names = draw(st.sets(st.sampled_from(sorted(PLAIN_ARGUMENTS)), max_size=2))
    if names:
        body["vllm_xargs"] = {
            name: draw(PLAIN_ARGUMENTS[name]) for name in sorted(names)
        }
    # The first of each is what hypothesis takes most often.
    body["max_tokens"] = draw(st.sampled_from([16, MOST_TOKENS, 8, 3, 1]))
    body["stream"] = draw(st.sampled_from([True, False]))
    if path == COMPLETIONS:
        return body | {"prompt": draw(PROMPTS)}
    if body.get("logprobs") is not None:
        body |= {"top_logprobs": body["logprobs"], "logprobs": True}
    question = draw(st.one_of(st.sampled_from(QUESTIONS), st.text(max_size=40)))
    return body | {"messages": [{"role": "user", "content": question}]}


@st.composite
def broken(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """The body of a request of which one thing, or a few, are odd."""
    body = draw(plain(path))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(["known", "other", "argument", "argument", "prompt"])
        )
        if kind == "prompt":
            name = "prompt" if path == COMPLETIONS else "messages"
            body[name] = draw(ODD_PROMPTS)
        elif kind == "argument":
            others = body.get("vllm_xargs")
            odd = draw(ODD)
            name = draw(st.sampled_from(ARGUMENTS.split()))
            body["vllm_xargs"] = (
                others | {name: odd} if isinstance(others, dict) else odd
            )
        else:
            name = draw(
                st.sampled_from(sorted(PLAIN) if kind == "known" else OTHERS.split())
            )
            body[name] = draw(ODD)
    return body


@st.composite
def damaged(draw: st.DrawFn, path: str) -> bytes:
    """Bytes that are no JSON, or more of it than anybody reads."""
    whole = a_body(draw(plain(path)))
    kind = draw(
        st.sampled_from(["cut", "byte", "deep", "list", "twice", "noise", "empty"])
    )
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole) - 1))]
    if kind == "byte":
        at = draw(st.integers(0, len(whole) - 1))
        return whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
    if kind == "deep":
        depth = draw(st.sampled_from([10, 500, 20_000]))
        return b'{"prompt": "a", "vllm_xargs": ' + b"[" * depth + b"]" * depth + b"}"
    if kind == "noise":
        return draw(st.binary(max_size=40))
    return {"list": b"[" + whole + b"]", "twice": whole + whole, "empty": b""}[kind]


def from_document(document: dict[str, Any]) -> st.SearchStrategy[Request]:
    """Requests as the server's own OpenAPI document describes them, and such as it forbids."""
    import schemathesis  # a second that no other test of this folder waits for
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(document)
    kinds: list[st.SearchStrategy[Request]] = []
    for path in ROUTES:
        for mode in (*[GenerationMode.POSITIVE] * 3, GenerationMode.NEGATIVE):
            cases = schema[path]["POST"].as_strategy(generation_mode=mode)
            kinds.append(cases.map(_as_request(path)))
    return st.one_of(kinds)


def _as_request(path: str) -> Callable[[Any], Request]:
    def convert(case: Any) -> Request:
        body = case.body
        if isinstance(body, bytes):
            return Request(path, body)
        if isinstance(body, dict):
            # An unknown model would hide everything else.
            body = {"max_tokens": 8, "max_output_tokens": 8} | body | {"model": MODEL}
        elif not isinstance(body, (list, str, int, float, bool, type(None))):
            body = {}
        return Request(path, a_body(body))

    return convert


def requests(document: dict[str, Any]) -> st.SearchStrategy[Request]:
    """Two fifths valid, the rest wrong in some way; half of the streams are left."""
    leaving = st.sampled_from([1, None, 0, None])
    typical = st.sampled_from([COMPLETIONS, CHAT])
    ours = typical.flatmap(
        lambda path: st.one_of(*[plain(path)] * 4, *[broken(path)] * 3).flatmap(
            lambda body: leaving.map(
                lambda chunks: Request(
                    path, a_body(body), JSON, chunks if body["stream"] is True else None
                )
            )
        )
    )
    torn = typical.flatmap(
        lambda path: st.builds(
            Request,
            st.just(path),
            damaged(path),
            st.sampled_from([JSON, JSON, "text/plain", "multipart/form-data", ""]),
        )
    )
    weights = [ours] * 7 + [from_document(document)] * 2 + [torn]
    return st.sampled_from(range(len(weights))).flatmap(lambda kind: weights[kind])


def each(document: dict[str, Any], count: int, send: Callable[[Request], None]) -> None:
    """Give `count` requests to `send`, the same in every run."""

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(document))
    def generate(request: Request) -> None:
        send(request)

    generate()
