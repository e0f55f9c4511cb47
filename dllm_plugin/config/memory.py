"""Compute the memory of a step, which the engine reserves and `doctor` prints."""

from dataclasses import dataclass

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from .decode import CHUNK_ROWS, DecodeConfig
from .request.arguments import MAX_WORD_TOKENS, MAX_WORDS_TOKENS

CHUNK_STEP = 32  # between numbers of rows
CHUNK_COPIES = 8
# Of the memory that vLLM may use: what copies take at most.
CHUNK_SHARE = 0.03
# Bytes that vLLM may use; by default it may use more of 16 GiB.
SMALL_CARD = 14 << 30
ALIGNED_AT_ONCE = 1 << 22  # comparisons with bad words, of a byte each
ALIGNED_TENSORS = 8  # as large as these, while words are aligned
COUNTED_AT_ONCE = 1 << 18  # tokens of texts that penalties count at once
COUNTED_BYTES = 128  # of temporary tensors, for each of these
SCORED_COPIES = 8  # of a row's log-probabilities: scored, stored and emitted
PADDED_TO = 64  # columns of vLLM's LM head, before ranks share them


@dataclass(frozen=True)
class StepSize:
    """Count what a full step reads.

    Attributes:
        rows: logits rows.
        chunk: rows of which float32 copies are made at once.
        slots: requests at most, each with a row in the tables of biases.
        positions: positions of a canvas.
        vocab: columns of whole rows.
        shard: columns of this rank's rows.
        logit_bytes: bytes of a logit.
        logprobs: log-probabilities of a token at most, without its own.
    """

    rows: int
    chunk: int
    slots: int
    positions: int
    vocab: int
    shard: int
    logit_bytes: int
    logprobs: int

    @property
    def bad_words(self) -> int:
        """Return the most words of several tokens that a request can have."""
        return min(envs.VLLM_MAX_NUM_BAD_WORDS, MAX_WORDS_TOKENS // 2)


def step_size(vllm_config: VllmConfig, config: DecodeConfig) -> StepSize:
    """Return the size of a full step of an engine."""
    model = vllm_config.model_config
    scheduler = vllm_config.scheduler_config
    slots = scheduler.max_num_seqs
    vocab = model.get_vocab_size()
    shard = vocab
    if config.vocab_parallel:
        padded = -(-vocab // PADDED_TO) * PADDED_TO
        shard = padded // vllm_config.parallel_config.tensor_parallel_size
    rows = min(slots * config.canvas_length, scheduler.max_num_batched_tokens)
    return StepSize(
        rows=rows,
        chunk=min(rows, config.rows_at_once),
        slots=slots,
        positions=config.canvas_length,
        vocab=vocab,
        shard=shard,
        logit_bytes=model.head_dtype.itemsize,
        logprobs=min(model.max_logprobs, vocab),
    )


def usable_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of the device that vLLM may use, which ignores the share beside others."""
    total = current_platform.get_device_total_memory()
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return total
    return int(cache.gpu_memory_utilization * total)


def is_small_card(vllm_config: VllmConfig) -> bool:
    """Return whether the engine runs on a GPU of which vLLM may use little memory."""
    if current_platform.is_cpu():
        return False
    return usable_bytes(vllm_config) < SMALL_CARD


def chunk_rows(columns: int, usable: int) -> int:
    """Return the rows whose float32 copies fit their share of the bytes that vLLM may use."""
    row = CHUNK_COPIES * columns * torch.float32.itemsize
    fitting = round(CHUNK_SHARE * usable / row / CHUNK_STEP) * CHUNK_STEP
    return min(CHUNK_ROWS, max(CHUNK_STEP, fitting))


def reserved_bytes(size: StepSize) -> int:
    """Return the device memory that sampling and its tables take in a full step."""
    tables = penalty_bytes(size) + bad_word_bytes(size) + _logprob_bytes(size)
    return _sampling_bytes(size) + tables


def _sampling_bytes(size: StepSize) -> int:
    """Return the bytes of logits and of their copies.

    Float32 copies are the copy, the tempered and filtered copy, and what top-p sorts (values, int64
    indices, probabilities, mask and result).
    """
    copies = CHUNK_COPIES * size.chunk * size.vocab * 4
    gathered = 0
    if size.shard < size.vocab:
        gathered = size.chunk * size.vocab * size.logit_bytes
    biases = (size.slots + 1) * size.vocab * 4
    return size.rows * size.shard * size.logit_bytes + copies + gathered + biases


def penalty_bytes(size: StepSize) -> int:
    """Return the bytes of tables of tokens that texts have, and of counting a full step."""
    cell = torch.bool.itemsize + torch.int32.itemsize
    counted = max(COUNTED_AT_ONCE, size.slots, size.slots * size.positions)
    return cell * size.slots * size.vocab + COUNTED_BYTES * counted


def bad_word_bytes(size: StepSize) -> int:
    """Return the bytes of aligning the bad words of a full step."""
    alignments = size.positions + MAX_WORD_TOKENS - 1
    pairs = size.slots * alignments * size.bad_words
    return ALIGNED_TENSORS * ALIGNED_AT_ONCE + pairs * 2 * torch.int32.itemsize


def _logprob_bytes(size: StepSize) -> int:
    """Return the bytes of stored log-probabilities, and of those of a full step."""
    cell = torch.int32.itemsize + torch.float32.itemsize
    entry = cell * (size.logprobs + 1) + torch.int64.itemsize
    return entry * (size.slots * size.positions + SCORED_COPIES * size.rows)
