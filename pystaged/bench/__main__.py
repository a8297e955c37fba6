"""`python -m pystaged.bench` is `pystaged bench`."""

import sys

from pystaged._program import main

sys.argv[:1] = ["pystaged", "bench"]
main()
