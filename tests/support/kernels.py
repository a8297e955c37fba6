"""The kernels that this machine can run."""

from __future__ import annotations

from pystaged import _core

KERNELS = _core.kernels()
