"""`python -m pystaged` is the command line."""

from pystaged._program import main

main()
