"""Begin answers whose first blocks a template gives: no forward decides anything there.

Such a request starts like one that has these tokens already, and they go out with its first output.
"""

from collections.abc import Container

import numpy as np
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request


class GivenStarts:
    """Keep the given tokens of requests that have had no output yet."""

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def add(self, request: Request, token_ids: list[int]) -> None:
        """Let a request that was just admitted begin behind `token_ids`."""
        request.append_output_token_ids(token_ids)
        self._of[request.request_id] = token_ids

    def put(
        self, outputs: dict[int, EngineCoreOutputs], requests: Container[str]
    ) -> None:
        """Put them in front of first outputs, and forget those of requests that are gone."""
        if not self._of:
            return
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.request_id in self._of and output.new_token_ids:
                    given = self._of.pop(output.request_id)
                    output.new_token_ids = [*given, *output.new_token_ids]
                    if output.new_logprobs is not None:
                        output.new_logprobs = _with_certain(output.new_logprobs, given)
                    if output.routed_experts is not None:  # its trace
                        first = np.array([[0.0, np.nan]] * len(given), dtype=np.float32)
                        output.routed_experts = np.concatenate(
                            [first, output.routed_experts]
                        )
        self._of = {key: given for key, given in self._of.items() if key in requests}


def _with_certain(lists: LogprobsLists, token_ids: list[int]) -> LogprobsLists:
    """Return log-probabilities behind those of given tokens, which are certain."""
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
