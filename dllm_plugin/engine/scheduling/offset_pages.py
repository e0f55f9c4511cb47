"""Share pages of prompts whose blocks do not end where pages end.

If blocks are counted from the end of a prompt, all of them end `origin` tokens after a
multiple of their length. The last block that begins in a page then ends `origin` tokens
after the page, and keys of the page depend on these tokens.
"""

import copy

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


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
    salt = request.cache_salt or ""
    if whole_blocks:
        first = list(request._all_token_ids[:origin])
        request.cache_salt = f"{salt}/after {first}"
        request._block_hasher = OffsetPages(request, origin)
    else:
        request.cache_salt = f"{salt}/only {request.request_id}"
    request.block_hashes.clear()
    request.update_block_hashes()
