"""`python -m llamac.generate DIR --prompt TEXT` generates text with a model.

DIR is a checkpoint, or any Hugging Face directory of a Llama with its tokenizer. The answer is printed while
it is generated. --chat uses the directory's chat template: once with --prompt, otherwise line by line from
the terminal. --prompts FILE answers many prompts and prints JSON lines. docs/guides/generate.md has examples.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from llamac.errors import InputError, run
from llamac.files import read_bytes
from llamac.inference import Inference, Sampling, TextStream, add_flags

Messages = list[dict[str, Any]]
MOST_TOKENS = 256  # of an answer, without --tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llamac.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt", metavar="TEXT", help="text that the model continues")
    which.add_argument("--prompt-ids", metavar="LIST", help="the prompt as token ids, separated by commas")
    which.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt per line; .jsonl: {"prompt": ...} or {"messages": [...]} per line; -: stdin',
    )
    add("--chat", action="store_true", help="use prompts as messages of a user, with the chat template")
    add("--system", metavar="TEXT", help="system message, with --chat")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"largest number of tokens of an answer ({MOST_TOKENS}, or fewer that fit into the context)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="temperature; 0: the most likely token (0.8)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens; 0: all (0)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens of this total probability (1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers (0)")
    add("--stop-ids", metavar="LIST", help="additional tokens that end an answer")
    add("--ignore-end", action="store_true", help="ignore the model's own end tokens")
    add("--no-bos", action="store_true", help="omit the token that begins a document")
    add("--batch", type=int, default=8, metavar="N", help="prompts of a file per batch (8)")
    add(
        "--context", type=int, metavar="N", help="largest number of tokens of prompt and answer (the model's)"
    )
    add_flags(parser)
    return parser


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"{flag}: expected ids separated by commas, found {text[:60]!r}") from None


def _prompt_of(line: str, where: str) -> str | Messages:
    """The prompt of a JSON line: a text, or the messages of a chat."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected JSON: {error}") from None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return row["prompt"]
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return row["messages"]
    raise InputError(f'{where}: expected {{"prompt": TEXT}} or {{"messages": [...]}}, found {line[:60]}')


def read_prompts(name: str) -> list[str | Messages]:
    """The prompts of a file, or of standard input where it is -. Raises InputError naming file and line."""
    content = sys.stdin.buffer.read() if name == "-" else read_bytes(Path(name))
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}: line {line}: expected UTF-8") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{name}: expected a prompt per line, found none")
    if Path(name).suffix in (".jsonl", ".json"):
        return [_prompt_of(line, f"{name}: line {number}") for number, line in numbered]
    return [line for _, line in numbered]


class Session:
    """What the flags say of every answer."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        batch = args.batch if args.prompts else 1
        self.model = Inference(args.directory, args.dtype, args.context, sequences=batch, kernels=args.kernel)
        own = [] if args.ignore_end else self.model.stops
        more = _ids(args.stop_ids, "--stop-ids") if args.stop_ids else []
        self.stops = [*own, *(id for id in more if id not in own)]

    def encode(self, prompt: str | Messages) -> list[int]:
        if isinstance(prompt, str) and not self.args.chat:
            return self.model.encode(prompt, bos=not self.args.no_bos)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.args.system is not None:
            messages = [{"role": "system", "content": self.args.system}, *messages]
        return self.model.encode_chat(messages)

    def tokens(self, prompts: list[list[int]]) -> int:
        """The largest number of tokens of an answer."""
        if self.args.tokens is not None:
            return self.args.tokens
        # The last token of an answer takes no place in the context: it is not read again.
        return max(1, min(MOST_TOKENS, self.model.context - max(map(len, prompts)) + 1))

    def stream(self, ids: list[int], out: TextIO) -> str:
        """Prints the answer as it is made; returns it. The token that ended it is not part of its text."""
        text, told = TextStream(self.model.decode), []

        def write(piece: str) -> None:
            told.append(piece)
            out.write(piece)
            out.flush()

        def made(_: int, token: int) -> bool:
            if token not in self.stops:
                write(text.add(token))
            return True

        self.model.generate([ids], self.tokens([ids]), self.sampling, self.stops, made)
        write(text.end())
        return "".join(told)


def answer_file(session: Session, prompts: Iterable[str | Messages], out: TextIO) -> None:
    """A JSON line per prompt, in their order, each as soon as those before it are there."""
    asked = list(prompts)
    ids = [session.encode(prompt) for prompt in asked]
    step = session.args.batch
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        s = session.sampling
        answers = session.model.generate(some, session.tokens(some), s, session.stops, first=first)
        for prompt, answer in zip(asked[first : first + step], answers):
            ended = answer[-1] in session.stops
            text = session.model.decode(answer[:-1] if ended else answer)
            row: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "messages": prompt, "text": text}
            row |= {"tokens": len(answer), "ended_by": "stop" if ended else "length"}
            print(json.dumps(row, ensure_ascii=False), file=out, flush=True)


def talk(session: Session, lines: Iterable[str], out: TextIO) -> None:
    """A conversation: each line a message of the user's."""
    messages: Messages = []
    for line in lines:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        answer = session.stream(session.encode(messages), out)
        messages.append({"role": "assistant", "content": answer})
        out.write("\n")


def main() -> None:
    args = _parser().parse_args()
    if args.batch < 1:
        raise InputError(f"--batch: expected a number from 1 on, found {args.batch}")
    if args.system is not None and not args.chat:
        raise InputError("--system: expected it with --chat")
    single = args.prompt if args.prompt_ids is None else _ids(args.prompt_ids, "--prompt-ids")
    if single is None and args.prompts is None and not args.chat:
        raise InputError("prompt: expected --prompt, --prompt-ids, --prompts or --chat, found none of them")
    prompts = read_prompts(args.prompts) if args.prompts else []
    session = Session(args)
    if prompts:
        answer_file(session, prompts, sys.stdout)
    elif single is None:
        talk(session, sys.stdin, sys.stdout)
    elif isinstance(single, str):
        session.stream(session.encode(single), sys.stdout)
        print()
    else:
        made = session.model.generate([single], session.tokens([single]), session.sampling, session.stops)[0]
        print(",".join(map(str, made)))


if __name__ == "__main__":
    try:
        run(main)
    except KeyboardInterrupt:
        sys.exit(130)
