"""Answer POST /v1/likelihood: every forward of an estimate is one completion request.

vLLM's own handler serves it, and batches it with all others.
"""

import copy
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.utils import random_uuid

from dllm_plugin.api.answers import as_response, endpoints
from dllm_plugin.api.counts import total
from dllm_plugin.api.likelihood import Sample, estimate
from dllm_plugin.api.likelihood_request import LikelihoodRequest, plan, read_pairs
from dllm_plugin.api.scorer import Refused, Scorer, Text, together
from dllm_plugin.api.viewer import not_ours
from dllm_plugin.api.watched_engine import WatchedEngine
from dllm_plugin.config.options import FILL, TEMPLATE
from dllm_plugin.config.template import no_template, read_template

router = APIRouter()


@router.post("/v1/likelihood", dependencies=[Depends(validate_json_request)])
@with_cancellation
@load_aware_call
async def create_likelihood(request: LikelihoodRequest, raw_request: Request) -> Response:
    """Answer with the log-likelihood of each continuation behind its context."""
    state, ours = raw_request.app.state, endpoints(raw_request)
    if ours is None:
        return not_ours()
    handler = copy.copy(state.openai_serving_completion)
    engine = WatchedEngine(ours.engine, ours.tracing, strips=True)
    handler.engine_client = engine
    most = ours.engine.vllm_config.scheduler_config.max_num_seqs
    scorer = Scorer(handler, request.model, most, raw_request)
    try:
        if refusal := no_template(ours.config, "likelihood"):
            raise ValueError(refusal)
        texts = await read_pairs(request, handler.renderer)
        for text in texts:
            read_template(ours.config, {TEMPLATE: [FILL] * len(text.continuation)})
        samples = plan(request, texts)
        scored, greedy = await together(
            (
                together(
                    scorer.logprobs(text, one.masked)
                    for text, of_text in zip(texts, samples, strict=True)
                    for one in of_text
                ),
                together(scorer.is_greedy(text) for text in texts if request.greedy),
            )
        )
    except ValueError as error:
        return as_response(handler.create_error_response(error), raw_request)
    except Refused as error:
        return as_response(error.reply, raw_request)
    return JSONResponse(reply_to(request, texts, samples, scored, greedy, engine))


def reply_to(
    request: LikelihoodRequest,
    texts: list[Text],
    samples: list[list[Sample]],
    scored: list[list[float]],
    greedy: list[bool],
    engine: WatchedEngine,
) -> dict[str, Any]:
    """Return the reply of a call whose forwards are all there."""
    results, rest = [], iter(scored)
    for place, (text, of_text) in enumerate(zip(texts, samples, strict=True)):
        found = estimate(request.method, of_text, [next(rest) for _ in of_text])
        counts = {"tokens": len(text.continuation), "samples": len(of_text)}
        matches = {"greedy": greedy[place] if request.greedy else None}
        results.append(found._asdict() | counts | matches)
    num_tokens = sum(len(text.context) + len(text.continuation) for text in texts)
    took = total(list(engine.counts.values())).as_json()
    return {
        "id": f"likelihood-{random_uuid()}",
        "object": "likelihood",
        "model": request.model,
        "results": results,
        "usage": {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
        },
        "metrics": {"diffusion": {name: took[name] for name in ("forwards", "computed_positions")}},
    }
