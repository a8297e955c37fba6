"""Runs the command line as `python -m pystaged`."""

from pystaged._program import main

main()
