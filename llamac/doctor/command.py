"""llamac doctor checks the installation.

It checks PyTorch, its platform and versions, the loaded libraries, the devices, the extension, a matrix
product and every function of llamac.ops, and times the last two. It prints one line each, "ok", "FAIL" or
"skip". A line with FAIL says what was expected and what to do, one with skip what was not checked. The exit
code is 1 if any check fails.
"""

from llamac.base.arguments import Parser
from llamac.doctor import installation, preflight


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("doctor", __doc__)
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="check the machine instead: settings, devices, links, measured and published rates",
    )
    asked = preflight if parser.parse_args(arguments).preflight else installation
    return installation.report(asked.examine())
