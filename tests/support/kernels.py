"""The kernels that tests run with: the scalar one, and those that this machine can run, where they are in the build."""

from __future__ import annotations

import platform

import pytest

from pystaged import _core

KERNELS = _core.kernels()
_OF_MACHINE = {
    "x86_64": ["avx512-vnni", "avx-vnni", "avx2"],
    "amd64": ["avx512-vnni", "avx-vnni", "avx2"],
    "aarch64": ["neon-i8mm", "neon-dotprod", "neon"],
    "arm64": ["neon-i8mm", "neon-dotprod", "neon"],
}
# For pytest's parametrize: those that are left out are skipped by name.
EVERY_KERNEL = [
    *KERNELS,
    *(
        pytest.param(name, marks=pytest.mark.skip(reason=f"kernel {name} is not in this build, or not for this CPU"))
        for name in _OF_MACHINE.get(platform.machine().lower(), [])
        if name not in KERNELS
    ),
]
