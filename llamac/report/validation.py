"""`llamac report validation FILE` renders the archive of `make validate` (dev/validate.py)."""

import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from llamac.base.arguments import Parser
from llamac.base.errors import InputError, printable
from llamac.base.files import open_file, parse_json, write_text
from llamac.base.version import provenance_text

FORMAT = "llamac validation 1"
_RECORD = dict.fromkeys(("stage", "status", "reason", "commit"), str) | {"seconds": float}
_TEXTS = dict.fromkeys(("platform", "system", "date", "version", "commit"), str)
_RESULTS = _TEXTS | {"stages": [_RECORD], "program": [str], "devices": [str]}
MOST_BYTES = 16 << 20  # of a file inside; an archive is smaller as a whole


@dataclass(frozen=True)
class Validation:
    results: dict
    texts: dict[str, str]  # by the file's name inside, without the first folder


def read(archive: Path) -> Validation:
    """Raises InputError for what is no archive of this format."""
    texts: dict[str, str] = {}
    with open_file(archive) as source:
        try:
            with tarfile.open(fileobj=source, mode="r:gz") as tar:
                for entry in tar:
                    if entry.isfile() and entry.size <= MOST_BYTES and (file := tar.extractfile(entry)):
                        name = entry.name.removeprefix("validation/")
                        texts[name] = file.read().decode("utf-8", "replace")
        except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError) as error:
            raise InputError(f"{archive}: expected what `make validate` writes, found {error!r}") from None
    content, where = texts.get("results.json", "{}"), f"{archive}: results.json"
    parse_json(content, where, {"format": {FORMAT}})  # first: another format has other fields
    return Validation(parse_json(content, where, _RESULTS), texts)


def _failures(text: str, most: int = 12) -> list[str]:
    """Lines of a log that say what failed; where none does, its end."""
    lines = [line for line in text.splitlines() if line.strip()]
    found = [
        line for line in lines if line.startswith(("FAIL", "FAILED", "ERROR", "E  ")) or "failed:" in line
    ]
    return (found or lines)[-most:]


# Of a stage's log, the last line that says what the stage found.
FOUND = re.compile(
    r"^(\d+ passed.*|all is well|nothing failed; .*|largest difference.*|.*\bratio [\d.]+.*)$", re.MULTILINE
)


def _found(record: dict, log: str) -> str:
    if record["status"] != "passed":
        return record["reason"]
    lines = FOUND.findall(log)
    return lines[-1].replace("|", "/") if lines else ""


def render(validation: Validation) -> str:
    """The machine, each stage's result, the failures, and the tables of the benchmarks."""
    results, texts = validation.results, validation.texts
    devices = results["devices"]
    title = devices[0] if devices else results["platform"]
    parts = [f"# {title}\n\nValidation of {provenance_text(results)}; {results['system']}."]
    parts.append("```\n" + "\n".join(results["program"]) + "\n```")
    if len(devices) > 1:
        parts.append("\n".join(f"- device {number}: {device}" for number, device in enumerate(devices)))
    rows = ["| stage | result | found | seconds |", "|---|---|---|---:|"]
    for record in results["stages"]:
        found = _found(record, texts.get(f"{record['stage']}/console.log", ""))
        if record["commit"] != results["commit"]:
            found += f" (at {record['commit']})"
        rows.append(f"| {record['stage']} | {record['status']} | {found} | {record['seconds']:.0f} |")
    parts.append("\n".join(rows))
    for record in results["stages"]:
        if record["status"] in ("failed", "time was over"):
            log = texts.get(f"{record['stage']}/console.log", "")
            parts.append(f"## {record['stage']} failed\n\n```\n" + "\n".join(_failures(log)) + "\n```")
    if machine := texts.get("machine/console.log"):
        lines = [line for line in machine.splitlines() if line.startswith(("ok ", "FAIL"))]
        lines = [re.sub(r"(ok +torch: .*), /\S+$", r"\1", line) for line in lines]  # its folder is the user's
        parts.append("## The machine\n\n```\n" + "\n".join(lines) + "\n```")
    if results["platform"] != "cpu":  # times of emulated kernels say nothing
        parts += [text.strip() for name, text in sorted(texts.items()) if name.endswith(".md")]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> None:
    parser = Parser("report validation", "Render the archive of `make validate` as markdown.")
    parser.add_argument("archive", type=Path, metavar="FILE", help="validation.tar.gz")
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to write [standard output]")
    args = parser.parse_args(arguments)
    text = render(read(args.archive))
    if not args.to:
        print(printable(text), end="")
        return
    write_text(args.to, text)
    print(args.to)
