"""Run ``diffuplug infill``: fill the gaps of a text with an engine in this process."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dllm_plugin.config.request.arguments import TARGETS, TEMPLATE
from dllm_plugin.decoding.families import (
    FAMILIES,
    LLADA,
    Family,
    choose_strategy,
    no_gaps,
)
from dllm_plugin.infilling.gaps import (
    Filled,
    Gapped,
    beginning,
    filled,
    parts_of_text,
    together,
)
from dllm_plugin.infilling.lengths import (
    best_of,
    place_each,
    score_of,
    scoring_of,
    told,
)

from .generate import summary
from .models import architecture_of, check_length, is_elsewhere, read_config
from .offline import (
    conversation,
    engine_options,
    num_forwards,
    start_engine,
    stop_engine,
)
from .options import add_model_options, add_sampling, add_verbose, given_options

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.inputs import TokensPrompt

EXAMPLE = "The capital of [MASK:3] is [MASK:8]."


def add_parser(commands: Any) -> None:
    """Add the parser of `diffuplug infill`."""
    parser = commands.add_parser("infill")
    lengths = "or several lengths to choose from: [MASK:2,4], [MASK:auto]"
    parser.add_argument("text", help=f'text with gaps: "{EXAMPLE}", {lengths}')
    parser.add_argument(
        "--question", metavar="Q", help="the text answers it, after the chat template"
    )
    add_model_options(parser)
    add_sampling(parser)
    add_verbose(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the text with its gaps filled, and what it took on standard error."""
    parts = parts_of_text(args.text)
    args.strategy = _strategy_of(args)
    options = engine_options(args)
    lengths = [max(part, default=0) for part in parts if not isinstance(part, str)]
    check_length("[MASK:n]", max(lengths), options["model"])
    from dllm_plugin.config.decode import get_decode_config

    from .phases import screen

    with screen(args.verbose) as shown:
        llm = start_engine(options, shown.log)
        shown.end("ready")
        tokenizer: Any = llm.get_tokenizer()
        config = llm.llm_engine.vllm_config
        prompt = None if args.question is None else _chat(args.question, tokenizer)
        choices = place_each(
            parts,
            prompt,
            lambda part: list(tokenizer.encode(part)) or beginning(tokenizer),
            lambda part: list(tokenizer.encode(part, add_special_tokens=False)),
            get_decode_config(config).canvas_length,
            config.model_config.max_model_len,
        )
        start = time.perf_counter()
        outputs = _decoded(llm, choices, args)
        ends = {tokenizer.eos_token_id}
        fills = [
            filled(one, _tokens(output), ends, lambda ids: str(tokenizer.decode(ids)))
            for one, output in zip(choices, outputs, strict=True)
        ]
        best = 0
        if len(choices) > 1:
            scores = _scores(llm, choices, fills, outputs)
            best = best_of(scores)
            for entry in told(choices, scores):
                shown.note(f"length {entry['length']}: score {entry['score']:.2f}")
        seconds = time.perf_counter() - start
        shown.out.write(together(choices[best], fills[best]) + "\n")
        shown.out.flush()
        shown.note(
            summary(len(_tokens(outputs[best])), num_forwards(outputs[best]), seconds)
        )
        stop_engine(llm)
    return 0


def _strategy_of(args: argparse.Namespace) -> str:
    """Return the strategy given, or the family's own. Raises ValueError if it fills no gaps."""
    family: Family | None = LLADA  # of the bundled model, and of those read elsewhere
    model = args.model
    asked: str = given_options(args, ("strategy",)).get("strategy", "auto")
    if model is not None and not is_elsewhere(model):
        family = FAMILIES.get(architecture_of(read_config(model)))
    if family is None:
        return asked  # its architecture is refused next
    strategy, _ = choose_strategy(asked, family, adapted=False)
    if refused := no_gaps("a gap", strategy, family):
        raise ValueError(refused)
    return strategy


def _decoded(
    llm: "LLM", choices: list[Gapped], args: argparse.Namespace
) -> "Sequence[RequestOutput]":
    """Return what each choice of lengths gets, all in one batch."""
    from vllm import SamplingParams

    wishes = [
        SamplingParams(
            max_tokens=gapped.end,
            temperature=args.temperature,
            seed=args.seed,
            logprobs=0 if len(choices) > 1 else None,
            extra_args={TEMPLATE: gapped.template},
        )
        for gapped in choices
    ]
    return llm.generate(_prompts(choices), wishes, use_tqdm=False)


def _scores(
    llm: "LLM",
    choices: list[Gapped],
    fills: list[list[Filled]],
    outputs: "Sequence[RequestOutput]",
) -> list[float]:
    """Return the score of each choice, from one more batch of a forward each."""
    from vllm import SamplingParams

    scorings = [
        scoring_of(gapped, gaps) for gapped, gaps in zip(choices, fills, strict=True)
    ]
    of_tails: list[list[float]] = [[] for _ in choices]
    if scorings[0].places:  # all choices have the same tail
        wishes = [
            SamplingParams(
                max_tokens=scoring.places[-1] + 1,
                temperature=0,
                ignore_eos=True,
                logprobs=0,
                extra_args={TEMPLATE: scoring.template, TARGETS: scoring.targets},
            )
            for scoring in scorings
        ]
        found = map(_logprobs, llm.generate(_prompts(choices), wishes, use_tqdm=False))
        of_tails = [
            [logprobs[place] for place in scoring.places]
            for scoring, logprobs in zip(scorings, found, strict=True)
        ]
    each = zip(fills, outputs, of_tails, strict=True)
    return [
        score_of(gaps, _logprobs(output), of_tail) for gaps, output, of_tail in each
    ]


def _prompts(choices: list[Gapped]) -> "list[TokensPrompt]":
    return [{"prompt_token_ids": gapped.prompt} for gapped in choices]


def _tokens(output: "RequestOutput") -> list[int]:
    return list(output.outputs[0].token_ids)


def _logprobs(output: "RequestOutput") -> list[float]:
    """Return the log-probability of each token of an answer."""
    answer = output.outputs[0]
    assert answer.logprobs is not None, "they were asked for"
    rows = zip(answer.token_ids, answer.logprobs, strict=True)
    return [row[token].logprob for token, row in rows if row is not None]


def _chat(question: str, tokenizer: Any) -> list[int]:
    """Return a question as the chat template writes it, up to where its answer begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        conversation(question),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return ids
