"""Let other requests find the pages of a prompt, and nobody those of a generated text.

Where canvases float, the keys of a text depend on the pieces in which it was committed, which no
prefill of the same tokens would compute.
"""

import os

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

HASH_BYTES = 32


class PromptPages:
    """Hash full pages for vLLM's prefix cache: of the prompt as vLLM does, of the rest by chance.

    It stands in for the request's own hasher, which vLLM calls as its text grows.
    """

    def __init__(self, request: Request) -> None:
        hasher = request._block_hasher
        assert hasher is not None, "prefix caching is on"
        self.hasher = hasher
        self.num_shared = len(request.block_hashes)

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of the pages that became full."""
        shared = max(0, self.num_shared - len(request.block_hashes))
        hashes = self.hasher(request)
        own = [BlockHash(os.urandom(HASH_BYTES)) for _ in hashes[shared:]]
        return [*hashes[:shared], *own]

    def forget(self, request: Request) -> None:
        """Give the generated pages other hashes: a text that comes back is computed in pieces."""
        del request.block_hashes[self.num_shared :]
        request.update_block_hashes()
