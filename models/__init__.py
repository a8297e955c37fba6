"""Recipes: run as `python -m models.NAME` from the repository, or as scripts in this folder.

They import each other by plain names, as scripts do.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
