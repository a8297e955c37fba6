"""Benchmarks: `python -m pystaged.bench --help`."""
