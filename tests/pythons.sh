#!/usr/bin/env bash
# Installs pystaged for each of these Pythons, in an environment of its own, and tries it. Usage: pythons.sh PYTHON...
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for python in "$@"; do
    "$python" --version
    rm -rf "$work/env"
    "$python" -m venv "$work/env"
    "$work/env/bin/pip" install --quiet .
    "$work/env/bin/pystaged" generate "def fibonacci(n):" --max-tokens 16
    for receipt in tests/data/*.receipt; do
        "$work/env/bin/pystaged" verify "$receipt"
    done
done
