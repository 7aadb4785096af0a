"""The version and date of llamac that files of measured numbers record."""

import datetime
import subprocess
from pathlib import Path

from llamac import __version__

FOLDER = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The checkout's that this package lies in, as `train_llama3 --version` has it; "unknown" of a wheel."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", FOLDER, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != FOLDER:  # somebody else's, with us in it
            return "unknown"
        return git("describe", "--always", "--abbrev=12", "--dirty= (modified)", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, str]:
    """The keys date (of today), version and commit of a JSON file."""
    return {"date": datetime.date.today().isoformat(), "version": __version__, "commit": commit()}


def provenance_text(facts: dict[str, str]) -> str:
    """The same in a heading; facts: of provenance(), others may be beside them."""
    return f"llamac {facts['version']}, commit {facts['commit']}, {facts['date']}"
