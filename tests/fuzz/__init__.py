"""Damaged input of every kind: `python -m tests.fuzz --help`.

Case k of a target is a pure function of the seed, the target and k, so that one number repeats it. A case is read in a
child process; it fails when it crashes, takes too long, raises what is not documented, or takes much more memory than
it is large.
"""
