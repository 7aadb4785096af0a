"""`llamac report OUT [OUT2 ...]` draws runs in one HTML file, follows live runs, and exports."""

import argparse
import sys
from pathlib import Path

from llamac.base.arguments import Parser
from llamac.base.files import write_text
from llamac.report import content, export, page, serve, validation
from llamac.report.log import read
from llamac.report.plot import labels


def _arguments() -> argparse.Namespace:
    parser = Parser(
        "report",
        "Draw runs in one HTML file that needs no network, or write their logs for TensorBoard.\n"
        " `validation FILE` renders the archive of `make validate`.",
    )
    add = parser.add_argument
    add("out", nargs="+", metavar="OUT", help="directory of a run, or its log.jsonl")
    parser.path("--to", "file to write [report.html of the first run]", "FILE")
    follow = "follow the runs at http://127.0.0.1:PORT until Ctrl-C [8000]; 0: a free port"
    add("--serve", type=int, nargs="?", const=8000, metavar="PORT", help=follow)
    parser.path("--tensorboard", "write TensorBoard events to DIR", "DIR")
    parser.switch("--follow", "follow a live run and export it, until Ctrl-C")
    args = parser.parse_args()
    if args.tensorboard and (args.to or args.serve is not None):
        parser.error("an export writes no page: leave out --to and --serve")
    if args.follow and not args.tensorboard:
        parser.error("--follow belongs to --tensorboard")
    if args.serve is not None and not 0 <= args.serve <= 65535:
        parser.error(f"--serve: expected a port from 0 to 65535, found {args.serve}")
    return args


def main() -> None:
    if sys.argv[1:2] == ["validation"]:
        return validation.main(sys.argv[2:])
    args = _arguments()
    runs = dict(zip(labels(args.out), map(read, args.out)))
    if args.tensorboard:
        export.export(runs, args.tensorboard, args.follow)
        return
    if args.serve is not None:
        serve.serve(runs, args.serve)
        return
    first = Path(args.out[0])
    path = args.to or (first if first.is_dir() else first.parent) / "report.html"
    write_text(path, page.render(content.report(runs)))
    print(path)
