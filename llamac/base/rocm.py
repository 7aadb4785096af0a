"""Where this machine's ROCm is, and its versions. dev/platform.sh finds the compiler of the same ROCm."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HIP = re.compile(r"define HIP_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)")


@dataclass(frozen=True)
class Rocm:
    """The two versions began with the same number until ROCm 7; ROCm 10.0 has HIP 7.15."""

    folder: Path
    release: str  # of ROCm: "10.0.0", "7.2.4-93"; "" where the packages name none, as Debian's
    hip: str  # "7.15.26333"; "" where it is not known


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def find_rocm(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Rocm | None:
    """That of ROCM_PATH or HIP_PATH if one is set, else that of hipcc in PATH, else AMD's usual folder."""

    def newest_first(folder: Path, pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern), key=lambda found: _numbers(found.name), reverse=True)

    if named := environment.get("ROCM_PATH") or environment.get("HIP_PATH"):
        folders = [root / named.lstrip("/")]
    else:
        hipcc = shutil.which("hipcc", path=environment.get("PATH", ""))
        folders = [Path(hipcc).resolve().parents[1]] if hipcc else []
        folders += [root / "opt/rocm", *newest_first(root / "opt", "rocm-*")]
    for folder in folders:
        # AMD's packages since 7.13 install below core-10.0; core is the chosen one of several.
        parts = [folder, folder / "core", *newest_first(folder, "core-*")]
        release = next(filter(None, (_text(part / ".info/version") for part in parts)), "")
        headers = (_HIP.findall(_text(part / "include/hip/hip_version.h")) for part in parts)
        hip = ".".join(next(filter(None, headers), []))
        if release or hip:
            return Rocm(folder, release, hip or (release if _numbers(release)[:1] <= [7] else ""))
    return None
