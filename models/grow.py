"""Widen and deepen a GPT-2 GGUF file without changing what it computes; see pystaged/bench/grow.py."""

import argparse
from pathlib import Path

from pystaged.bench.grow import FILE_TYPES, grow


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Widen and deepen a GPT-2 GGUF file without changing what it computes."
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--width", type=int, default=1280, help="a multiple of the source's; the default is GPT-2 Large's"
    )
    parser.add_argument("--layers", type=int, default=36, help="at least the source's; the default is GPT-2 Large's")
    parser.add_argument("--type", dest="quantization", choices=FILE_TYPES, default="Q8_0")
    options = parser.parse_args()
    try:
        grow(**vars(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
