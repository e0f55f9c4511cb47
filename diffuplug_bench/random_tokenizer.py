"""Write a tokenizer for dummy weights, so that a server can turn their tokens into text."""

import json
from pathlib import Path

from diffuplug_bench.model_shapes import Config


def write_tokenizer(config: Config, folder: Path) -> str:
    """Write a tokenizer with a word for each token of the model; return its folder.

    It is byte-level, as those of the models are, so that texts of tokens are put together alike.
    """
    from tokenizers import Tokenizer, decoders, models

    size = config.get("embedding_size") or config["vocab_size"]
    # A space is written so in a byte-level vocabulary.
    words = {f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chosen), encoding="utf-8")
    return str(folder)
