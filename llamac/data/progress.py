"""Progress of a run on stderr: a bar on a terminal, otherwise a line every 30 seconds."""

import sys

from tqdm import tqdm

_LINE_SECONDS = 30
_LINE = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n"


class Progress:
    """`total`: bytes of all input files, None if unknown: then tokens are shown. `done`, `tokens`: the part
    that an earlier run did, which rates leave out.
    """

    def __init__(self, total: int | None, done: int = 0, tokens: int = 0):
        self._of_bytes = bool(total)
        how = {"initial": done, "unit": "B"} if total else {"initial": tokens, "unit": " tokens"}
        if not sys.stderr.isatty():
            how |= {"delay": _LINE_SECONDS, "mininterval": _LINE_SECONDS, "bar_format": _LINE}
        self._bar = tqdm(total=total or None, unit_scale=True, leave=False, **how)  # type: ignore[call-overload]

    def show(self, done: int, tokens: int, documents: int) -> None:
        text = f"{documents:,} documents, {tokens:,} tokens" if self._of_bytes else f"{documents:,} documents"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update((done if self._of_bytes else tokens) - self._bar.n)

    def close(self) -> None:
        self._bar.close()
