"""Let lm-evaluation-harness score texts and generate by a running server: model `diffuplug`.

``python examples/lm_eval_model.py --model diffuplug --model_args base_url=... --tasks ...``
is the harness's own command line, to which this model was added.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

# Names of the harness -> names of a completion request.
GENERATION = {
    "until": "stop",
    "max_gen_toks": "max_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
}
MAX_TOKENS = 256  # where a task names none, as for the harness's other models
SECONDS = 3600  # of a call: the server answers when all of its forwards are there


@register_model("diffuplug")
class ServedModel(LM):
    """Be a model of the harness: likelihoods by /v1/likelihood, texts by /v1/completions."""

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        method: str = "monte_carlo",
        samples: int | None = None,
        seed: int | None = None,
        greedy: bool = True,
        num_concurrent: int = 4,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Take `--model_args`.

        Args:
            method: how texts are scored, with `samples` and `seed`; left out, the server's own.
            greedy: also find out whether a greedy decode writes the continuation, for tasks that
                count that. It costs as many forwards as the continuation has tokens; without it
                no continuation counts as greedy.
            num_concurrent: calls under way at once.
            batch_size: given by the harness, like the two behind it; the server forms its batches.
        """
        super().__init__()
        self.url = str(base_url).rstrip("/")
        chosen = {"method": method, "samples": samples, "seed": seed}
        self.asked = {
            name: value for name, value in chosen.items() if value is not None
        }
        self.greedy = greedy
        self.model = model
        self.num_concurrent = num_concurrent
        self.session = requests.Session()
        if api_key is not None:
            self.session.headers["Authorization"] = f"Bearer {api_key}"

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether it is greedy."""
        return self._each(
            lambda context, text: self._score(context, text, self.greedy), requests
        )

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-likelihood of each (text,), which has no context."""
        return self._each(lambda text: self._score("", text, False)[0], requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return an answer to each (context, options)."""
        return self._each(self._generate, requests)

    def _each(self, answer: Callable[..., Any], asked: Iterable[Instance]) -> list[Any]:
        with ThreadPoolExecutor(self.num_concurrent) as pool:
            return list(pool.map(lambda instance: answer(*instance.args), asked))

    def _score(
        self, context: str, continuation: str, greedy: bool
    ) -> tuple[float, bool]:
        pair = {"context": context, "continuation": continuation}
        body = self.asked | {"pairs": [pair], "greedy": greedy}
        [result] = self._post("/v1/likelihood", body)["results"]
        return result["logprob"], bool(result["greedy"])

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        options = dict(options)
        if not options.pop("do_sample", False):
            options["temperature"] = 0
        if unknown := sorted(set(options) - set(GENERATION)):
            raise ValueError(
                f"generation_kwargs has {unknown[0]!r}, which the model diffuplug does not know; "
                f"known: do_sample, {', '.join(GENERATION)}."
            )
        named = {GENERATION[name]: value for name, value in options.items()}
        body = {"prompt": context, "max_tokens": MAX_TOKENS} | named
        choice = self._post("/v1/completions", body)["choices"][0]
        return str(choice["text"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.model is not None:
            body["model"] = self.model
        reply = self.session.post(self.url + path, json=body, timeout=SECONDS)
        if not reply.ok:
            raise RuntimeError(f"The server refused: {reply.text}")
        return dict(reply.json())


if __name__ == "__main__":
    cli_evaluate()
