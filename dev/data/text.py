"""Tokens of any text: `python -m llamac.text`, for a checkout whose package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llamac.errors import run
from llamac.text import main

if __name__ == "__main__":
    run(main)
