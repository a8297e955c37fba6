"""Average the weights of a model and of what was fine-tuned from it.

The average often does better than both: it keeps what the first had learnt from more text (WiSE-FT, arXiv 2109.01903).
"""

import argparse
from pathlib import Path

import numpy as np
from model import Checkpoint, load


def blended(base: Checkpoint, tuned: Checkpoint, share: float) -> Checkpoint:
    """That share of the tuned weights, the rest from the base."""
    if not np.array_equal(base.known, tuned.known):
        raise ValueError("the models know different tokens")
    base.model.reserve_channel()
    old, new = base.model.state_dict(), tuned.model.state_dict()
    tuned.model.load_state_dict({name: old[name].lerp(new[name], share) for name in new})
    return tuned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help=".pt or .gguf")
    parser.add_argument("tuned", type=Path, help=".pt")
    parser.add_argument("out", type=Path, help="checkpoint to write (.pt)")
    parser.add_argument("--share", type=float, required=True, help="share of the tuned model, 0 to 1")
    args = parser.parse_args()
    blended(load(args.base), load(args.tuned), args.share).save(args.out)


if __name__ == "__main__":
    main()
