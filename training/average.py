"""Average the weights of two checkpoints of the bundled model.

    python -m training.average BEFORE AFTER SHARE OUT

writes `(1 - SHARE) * BEFORE + SHARE * AFTER`. A model that learns something new from given weights
forgets a little; on the way back it remembers that sooner than it forgets the new.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from training.checkpoint import save_base
from training.model import Shape, load_weights


def main() -> None:
    """Write the average to a folder that exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("share", type=float)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    before, after = load_weights(args.before), load_weights(args.after)
    mixed = {}
    for name, weight in before.items():
        mixed[name] = weight + args.share * (after[name] - weight)
    tokenizer = Tokenizer.from_file(str(args.before / "tokenizer.json"))
    save_base(args.out, mixed, Shape(), tokenizer)


if __name__ == "__main__":
    main()
