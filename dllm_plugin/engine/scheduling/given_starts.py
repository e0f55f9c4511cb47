"""Emit leading blocks that a template gives, without running a forward.

Such a request starts as if it had these tokens already. They are sent with its first
output.
"""

from collections.abc import Container

import numpy as np
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request


class GivenStarts:
    """Store the given tokens of requests that have no output so far."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def add(self, request: Request, token_ids: list[int]) -> None:
        """Let an admitted request start after `token_ids`."""
        request.append_output_token_ids(token_ids)
        self._of[request.request_id] = token_ids

    def put(
        self, outputs: dict[int, EngineCoreOutputs], requests: Container[str]
    ) -> None:
        """Add given tokens to first outputs, and forget requests that are gone."""
        if not self._of:
            return
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.request_id in self._of and output.new_token_ids:
                    given = self._of.pop(output.request_id)
                    output.new_token_ids = [*given, *output.new_token_ids]
                    if output.new_logprobs is not None:
                        output.new_logprobs = _with_certain(output.new_logprobs, given)
        self._of = {key: given for key, given in self._of.items() if key in requests}


def _with_certain(lists: LogprobsLists, token_ids: list[int]) -> LogprobsLists:
    """Prepend the log-probabilities of given tokens, which are certain."""
    shape = (len(token_ids), lists.logprobs.shape[1])
    ids = np.repeat(np.array(token_ids)[:, None], shape[1], axis=1)
    rows = (
        (ids, lists.logprob_token_ids),
        (np.zeros(shape), lists.logprobs),
        (np.ones(shape[0]), lists.sampled_token_ranks),
    )
    ids, logprobs, ranks = (
        np.concatenate([given.astype(of.dtype), of]) for given, of in rows
    )
    return LogprobsLists(ids, logprobs, ranks, None)
