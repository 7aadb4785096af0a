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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_train import KNOWN

from llamac.base.errors import InputError, run
from llamac.base.files import read_bytes, read_json
from llamac.base.version import provenance_text
from llamac.bench import harness
from llamac.bench.report import PROGRAMS, Bar, bars
from llamac.bench.training import Run, by_round

# Tables of a page


@dataclass
class Table:
    """A markdown table, its text before it since the heading or table above, and the page's first heading."""

    path: Path
    line: int  # of its head
    head: list[str]
    rows: list[list[str]]
    text: str
    page: str

    def where(self) -> str:
        return f"{self.path}: table at line {self.line}"

    def title(self) -> str:
        """Device, date and commits: the last of a column "commit", else of the text."""
        found = re.search(r"(\d{4}-\d\d-\d\d),\s+commit\s+([0-9a-f]{7,40})\b", self.text)
        if not found:
            raise InputError(f"{self.where()}: expected `DATE, commit HASH` above it, found none")
        commits = [found[2]]
        if "commit" in self.head:
            commits = list(dict.fromkeys(row[self.head.index("commit")] for row in self.rows))
        return f"{self.page}, {found[1]}, commit {', '.join(commits)}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def tables(path: Path) -> list[Table]:
    """The tables of a markdown page. Raises InputError where a row has not the cells of its head."""
    page, text, found = "", "", []
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("# ") and not page:
            page = line.removeprefix("# ")
        if not line.startswith("|"):
            text = "" if line.startswith("#") else f"{text}\n{line}"
        elif number == 1 or not lines[number - 2].startswith("|"):
            found.append(Table(path, number, cells(line), [], text, page))
            text = ""
        elif number > found[-1].line + 1:  # below its head and the line of dashes
            row = cells(line)
            if len(row) != (wanted := len(found[-1].head)):
                raise InputError(f"{path}: line {number}: expected {wanted} cells, found {len(row)}")
            found[-1].rows.append(row)
    return found


def first_with(path: Path, *columns: str) -> Table:
    """The first table of the page that has the columns."""
    for table in tables(path):
        if set(columns) <= set(table.head):
            return table
    raise InputError(f"{path}: expected a table with the columns {', '.join(columns)}, found none")


def number(text: str, table: Table) -> float:
    """Of a cell: 11,031 or 97.6."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise InputError(f"{table.where()}: expected a number, found {text[:40]!r}") from None


Speeds = dict[str, dict[str, tuple[float, float | None]]]  # (tokens/s, ratio) by workload, by program
SAME = ("llamac", "eager", "script", "hf", "torchao")
FILE_COLUMNS = {"file": "compile"} | {name: name for name in SAME}


def training_of_page(path: Path) -> tuple[str, Speeds]:
    """Columns `PROGRAM tokens/s`; the ratio of a program is the next column of that name."""
    table = first_with(path, "workload", "llamac tokens/s", "file tokens/s")
    workload = table.head.index("workload")
    speeds: Speeds = {}
    for row in table.rows:
        group = speeds.setdefault(row[workload], {})
        for word, program in FILE_COLUMNS.items():
            if f"{word} tokens/s" not in table.head or not row[at := table.head.index(f"{word} tokens/s")]:
                continue
            text = row[table.head.index("ratio", at)] if "ratio" in table.head[at:] else ""
            ratio = number(text, table) if text and program != "llamac" else None
            group[program] = number(row[at], table), ratio
    return table.title(), speeds


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
