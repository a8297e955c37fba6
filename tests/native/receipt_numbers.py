"""Prints what repeat_tests reads of a receipt, whose other options have their defaults: receipt_numbers.py FILE."""

import json
import sys
from pathlib import Path

receipt = json.loads(Path(sys.argv[1]).read_text("utf-8"))
sampling = receipt["options"]["sampling"]
names = ["temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n"]
print(receipt["n_ctx"], *(sampling[name] for name in names))  # noqa: T201
for tokens in receipt["prompt"]["tokens"], receipt["text"]["tokens"]:
    print(len(tokens), *tokens)  # noqa: T201
