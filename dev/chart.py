"""The picture of tokens/s beside PyTorch: that of README, or of your own results.

    dev/chart.py FILE --to PNG

FILE is a page of docs/benchmarks, of which the first table of tokens/s is drawn, or the JSON that
dev/bench_train.py wrote. `llamac bench` draws its own results. Every number comes from FILE, and so do the
device, the date and the commit in the title. What FILE has no number for has no bar.

Exit code: 2 for a file that cannot be drawn.
"""

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_train import KNOWN

from llamac.base.errors import InputError, run
from llamac.base.files import read_bytes, read_json
from llamac.base.version import provenance_text
from llamac.bench import harness
from llamac.bench.report import PROGRAMS, Bar, bars
from llamac.bench.training import Run, by_round

Speeds = dict[str, dict[str, tuple[float, float | None]]]  # (tokens/s, ratio) by workload, by program
SAME = ("llamac", "eager", "script", "hf", "torchao")
FILE_COLUMNS = {"file": "compile"} | {name: name for name in SAME}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def first_table(text: str, path: Path, *columns: str) -> tuple[int, list[list[str]]]:
    """(place in a page's text, head and rows) of its first table that has the columns. Raises InputError."""
    for found in re.finditer(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, *lines = map(cells, found[0].splitlines())
        if set(columns) <= set(head):
            for number, row in enumerate(lines, text.count("\n", 0, found.start()) + 2):
                if len(row) != len(head):
                    expected = f"expected {len(head)} cells, found {len(row)}"
                    raise InputError(f"{path}: line {number}: {expected}")
            return found.start(), [head, *lines[1:]]  # without the line of dashes
    raise InputError(f"{path}: expected a table with the columns {', '.join(columns)}, found none")


def training_of_page(path: Path) -> tuple[str, Speeds]:
    """Columns `PROGRAM tokens/s`; the ratio of a program is the next column of that name. The title has the
    date and the commit of the text above, or the commits of a column.
    """
    text = read_bytes(path).decode("utf-8", "replace")
    begin, (head, *rows) = first_table(text, path, "workload", "llamac tokens/s", "file tokens/s")
    line = text.count("\n", 0, begin) + 1
    where = f"{path}: table at line {line}"

    def number(cell: str) -> float:
        """11,031 or 97.6."""
        try:
            return float(cell.replace(",", ""))
        except ValueError:
            raise InputError(f"{where}: expected a number, found {cell[:40]!r}") from None

    above = re.split(r"^[#|].*$", text[:begin], flags=re.MULTILINE)[-1]
    if not (found := re.search(r"(\d{4}-\d\d-\d\d),\s+commit\s+([0-9a-f]{7,40})\b", above)):
        raise InputError(f"{where}: expected `DATE, commit HASH` above it, found none")
    commits = [row[head.index("commit")] for row in rows] if "commit" in head else [found[2]]
    page = re.search(r"^# (.*)$", text, re.MULTILINE)
    title = f"{page[1] if page else ''}, {found[1]}, commit {', '.join(dict.fromkeys(commits))}"
    speeds: Speeds = {}
    for row in rows:
        group = speeds.setdefault(row[head.index("workload")], {})
        for word, program in FILE_COLUMNS.items():
            if f"{word} tokens/s" not in head or not row[at := head.index(f"{word} tokens/s")]:
                continue
            ratio = row[head.index("ratio", at)] if "ratio" in head[at:] and program != "llamac" else ""
            group[program] = number(row[at]), number(ratio) if ratio else None
    return title, speeds


def training_of_json(path: Path) -> tuple[str, Speeds]:
    """Medians of the runs that did not fail, as in bench_train.md."""
    content = read_json(path)
    runs = [Run(**one) for one in content["runs"]]
    speeds: Speeds = {}
    for name in dict.fromkeys(one.workload for one in runs):
        here, group = [one for one in runs if one.workload == name], {}
        for program in dict.fromkeys(one.program for one in here):
            if own := by_round(here, program):
                ratio = None if program == "llamac" else harness.ratio(by_round(here, "llamac"), own)
                group[program] = statistics.median(own.values()), ratio
        w = KNOWN.get(name)
        speeds[f"{w.model}, B={w.B} T={w.T}" if w else name] = group
    device = next((one.device for one in runs if one.device and one.program == "llamac"), "")
    return f"{device}, {provenance_text(content)}", speeds


def draw(path: Path, to: Path) -> None:
    """Bars relative to llamac's: workloads differ by more than programs do. The labels have the tokens/s."""
    title, speeds = (training_of_json if path.suffix == ".json" else training_of_page)(path)
    groups = {}
    for workload, group in speeds.items():
        if len(group) > 1 and "llamac" in group:
            most = group["llamac"][0]
            groups[workload.replace(", ", "\n", 1)] = {
                name: Bar(100 * speed / most, f"{speed:,.0f}" + (f"   {ratio:.2f}x" if ratio else ""))
                for name, (speed, ratio) in group.items()
            }
    if unknown := {name for group in groups.values() for name in group} - PROGRAMS.keys():
        raise InputError(f"{path}: expected programs of {', '.join(PROGRAMS)}, found {min(unknown)}")
    if not groups:
        raise InputError(f"{path}: expected measurements to draw, found none")
    title = f"Training, tokens per second\n{title}\n1.05x: llamac does 1.05 times as many"
    bars({"% of llamac's tokens/s": groups}, title, to)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a page or the JSON of a benchmark")
    parser.add_argument("--to", type=Path, required=True, metavar="PNG", help="the picture")
    options = parser.parse_args()
    try:
        draw(options.file, options.to)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{options.file}: not the JSON of a benchmark: {error!r}") from None
    print(options.to)


if __name__ == "__main__":
    run(main)
