"""`python -m pystaged` is the command line."""

from pystaged.cli import main

main()
