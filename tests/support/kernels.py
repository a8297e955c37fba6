"""The kernels that tests run with: the scalar one, and those that this machine can run, where they are in the build."""

from __future__ import annotations

import platform

import pytest

from pystaged import _core

KERNELS = _core.kernels()
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_OF_MACHINE = ["neon-i8mm", "neon-dotprod", "neon"] if _IS_ARM else ["avx512-vnni", "avx-vnni", "avx2"]
# For pytest's parametrize: those that are left out are skipped by name.
EVERY_KERNEL = [
    *KERNELS,
    *(
        pytest.param(name, marks=pytest.mark.skip(reason=f"kernel {name} is not in this build, or not for this CPU"))
        for name in _OF_MACHINE
        if name not in KERNELS
    ),
]
