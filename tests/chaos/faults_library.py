"""faults.c, compiled: how a process is started so that its k-th call of a kind fails, or kills it."""

import subprocess
from pathlib import Path


class FaultsLibrary:
    def __init__(self, folder: Path):
        self.path = folder / "faults.so"
        source = Path(__file__).with_name("faults.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self.path, source, "-ldl"], check=True)

    def environment(self, below: Path, call: str, at: int, action: str, on: str = "once") -> dict[str, str]:
        """Variables of the process: calls on files below a folder."""
        values = {"FOLDER": below, "CALL": call, "AT": at, "ACTION": action, "ON": on}
        variables = {f"CHAOS_{name}": str(value) for name, value in values.items()}
        return variables | {"LD_PRELOAD": str(self.path)}
