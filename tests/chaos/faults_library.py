"""faults.c, compiled: how a run is started so that its k-th call of a kind fails, or kills it."""

import subprocess
from pathlib import Path

from common import Reference, Run, expect


class FaultsLibrary:
    def __init__(self, folder: Path):
        self.path = folder / "faults.so"
        source = Path(__file__).with_name("faults.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self.path, source, "-ldl"], check=True)

    def environment(self, run: Run, call: str = "", at: int = 0, action: str = "0", on: str = "once") -> dict:
        """For Run.start; without a call, the calls are counted alone."""
        values = {"FOLDER": run.folder, "CALL": call, "AT": at, "ACTION": action, "ON": on}
        values["COUNTS"] = run.folder / "calls"
        return {f"CHAOS_{name}": str(value) for name, value in values.items()} | {
            "LD_PRELOAD": str(self.path)
        }

    def count(self, reference: Reference, run: Run) -> dict[str, int]:
        """Calls of each kind that a run makes from where it stands to its end."""
        code = run.run("--resume", "auto", environment=self.environment(run))
        expect(code == 0, "the run whose calls are counted failed:", run.errors())
        reference.expect_same(run)
        lines = (run.folder / "calls").read_text().splitlines()
        return {kind: int(number) for kind, number in map(str.split, lines) if int(number)}
