"""Share the cached pages of prompts, and never those of generated texts.

If canvases float, the keys of a text depend on the pieces in which it was committed. A
prefill of the same tokens would compute other keys.
"""

import os

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

HASH_BYTES = 32


class PromptPages:
    """Hash pages of generated text at random, so that the prefix cache never matches them.

    Replaces the request's own hasher, which vLLM calls whenever the text grows. Pages of
    the prompt have their hashes by then.
    """

    def __init__(self, request: Request, page: int) -> None:
        hasher = request._block_hasher
        assert hasher is not None, "prefix caching is on"
        self.hasher = hasher
        self.num_pages = request.num_prompt_tokens // page

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of pages that became full."""
        return [BlockHash(os.urandom(HASH_BYTES)) for _ in self.hasher(request)]

    def evict(self, manager: KVCacheManager, request_id: str) -> None:
        """Evict the generated pages from the cache, so that they are reused first.

        A text that comes back from preemption must not find them: it is computed in pieces.
        """
        for pages in manager.get_block_ids(request_id):
            manager.evict_blocks(set(pages[self.num_pages :]))
