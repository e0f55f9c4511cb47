"""Build the bundled tokenizer: whole words of our stories, single digits, bytes for all other text.

It is a BPE model without merges and with ``ignore_merges``: a piece that is in the vocabulary is
one token, any other piece is split into its bytes. So every text can be encoded, and
``decode(encode(text)) == text``. Special tokens and chat template are LLaDA's.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from diffuplug_bench.word_problems.chat_prompts import (
    BOS,
    EOS,
    EOT,
    HEAD,
    MASK,
    TAIL,
    token_id,
)

SPECIAL_TOKENS = (BOS, EOS, MASK, HEAD, TAIL, EOT)
VOCAB_SIZE = 512
# One digit; an operator with its spaces; a word or a sign with the space before it; white space.
PIECES = r"\d| [-+*/=] | ?\p{L}+| ?[^\s\p{L}\d]+|\s+"
EXTRA_PIECES = ("user", "assistant", "system", "\n\n", "\n", " ", "####")
# Of JSON answers and the request for them; a schema may leave ` [` to be written by itself.
JSON_PIECES = (
    " Answer",
    " JSON",
    '{"',
    "steps",
    '":',
    ' ["',
    " [",
    '",',
    ' "',
    '"],',
    "answer",
)
WORDS = 484  # pieces before the special tokens; those of JSON follow them
# LLaDA's template: an empty assistant header always follows, whatever add_generation_prompt says.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Build a tokenizer whose whole-word tokens are the most frequent pieces of `texts`."""
    cut = _pre_tokenizer()
    counts = Counter(piece for text in texts for piece, _ in cut.pre_tokenize_str(text))
    wanted = [cut.pre_tokenize_str(piece)[0][0] for piece in EXTRA_PIECES]
    wanted += [
        piece
        for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for piece in dict.fromkeys(wanted):
        if piece not in pieces and len(pieces) < WORDS:
            pieces.append(piece)
    if len(pieces) < WORDS:
        raise ValueError(
            f"{len(pieces)} pieces found, {WORDS} needed: generate more problems"
        )
    pieces += SPECIAL_TOKENS  # among the others, so that their ids are the model's too
    pieces += [cut.pre_tokenize_str(piece)[0][0] for piece in JSON_PIECES]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id(tokenizer, t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for t in SPECIAL_TOKENS
    }
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1024,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
