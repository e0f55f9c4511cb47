"""Hash pages of the prefix cache by all that their keys depend on.

If blocks are counted from the end of a prompt, all of them end `origin` tokens after a
multiple of their length. The last block that begins in a page then ends `origin` tokens
after the page, and keys of the page depend on these tokens.

If canvases float, the keys of a text depend on the pieces in which it was committed, so
only pages of prompts are shared.
"""

import copy
import os

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

HASH_BYTES = 32


class OffsetPages:
    """Hash each page with the `origin` tokens after it, on which its keys depend.

    Replaces the request's own hasher, which hashes the same text without its first `origin`
    tokens. These are in the salt.
    """

    def __init__(self, request: Request, origin: int) -> None:
        hasher = request._block_hasher
        assert hasher is not None, "prefix caching is on"
        self.hasher, self.origin = hasher, origin

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of pages after which `origin` tokens are known now."""
        shifted = copy.copy(request)
        shifted._all_token_ids = request._all_token_ids[self.origin :]
        shifted.all_token_ids = shifted._all_token_ids  # type: ignore[assignment]
        return self.hasher(shifted)


def share_pages(request: Request, origin: int, whole_blocks: bool) -> None:
    """Let a request share pages with those of equal text and equal `origin`.

    `whole_blocks`: a page is a number of whole blocks. If it is not, nothing is shared.
    """
    if request._block_hasher is None or (whole_blocks and not origin):
        return
    if not whole_blocks:
        salt_pages(request, f"/only {request.request_id}")
        return
    first = list(request._all_token_ids[:origin])
    request._block_hasher = OffsetPages(request, origin)
    salt_pages(request, f"/after {first}")


def salt_pages(request: Request, salt: str) -> None:
    """Hash the pages of a request anew, which only requests with the same salt share."""
    request.cache_salt = f"{request.cache_salt or ''}{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


class PromptPages:
    """Hash pages of generated text at random, so that the prefix cache never matches them.

    A prefill of the same tokens would compute other keys. Replaces the request's own hasher,
    which vLLM calls whenever the text grows. Pages of the prompt have their hashes by then.
    """

    def __init__(self, request: Request, page: int) -> None:
        hasher = request._block_hasher
        assert hasher is not None, "prefix caching is on"
        self.hasher = hasher
        self.num_pages = request.num_prompt_tokens // page

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of pages that became full."""
        pages = self.hasher(request)
        return [BlockHash(os.urandom(HASH_BYTES)) for _ in pages]

    def evict(self, manager: KVCacheManager, request_id: str) -> None:
        """Evict the generated pages from the cache, so that they are reused first.

        A text that comes back from preemption must not find them: it is computed in pieces.
        """
        for pages in manager.get_block_ids(request_id):
            manager.evict_blocks(set(pages[self.num_pages :]))
