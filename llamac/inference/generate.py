"""`llamac generate DIR --prompt TEXT` generates text with a model; `llamac chat DIR` talks to it.

DIR is a checkpoint, a run's output folder (its newest checkpoint), or any Hugging Face directory of a Llama
with its tokenizer. Without a prompt, the model begins a document. The text is printed while it is generated.
--chat uses the chat template of the directory or of --template: once with --prompt, otherwise line by line
from the terminal, as `llamac chat` does. --prompts FILE answers many prompts and prints JSON lines.
docs/guides/generate.md has examples.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from llamac.base.arguments import Parser, check_least, split_list
from llamac.base.errors import CONTROL, InputError, printable
from llamac.base.files import parse_json, read_bytes
from llamac.data import chat
from llamac.inference.model import Inference, Sampling, TextModel, TextStream, add_flags

Messages = list[dict[str, Any]]
MOST_TOKENS = 256  # of an answer, without --tokens
TALK_TOKENS = 8192  # of a conversation, without --context


def _parser() -> Parser:
    parser = Parser(sys.argv[0].removeprefix("llamac "), __doc__)
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer; or a run's output folder")
    which = parser.add_mutually_exclusive_group().add_argument
    which("--prompt", metavar="TEXT", help="text that the model continues")
    which("--prompt-ids", metavar="LIST", help="the prompt as token ids, separated by commas")
    lines = 'a prompt per line; .jsonl: {"prompt": ...} or {"messages": [...]} per line; -: stdin'
    which("--prompts", metavar="FILE", help=lines)
    parser.switch("--chat", "use prompts as messages of a user, with the chat template")
    add("--system", metavar="TEXT", help="system message, with --chat")
    chat.add_flag(parser)
    room = f"{MOST_TOKENS}, or what fits behind the longest prompt"
    parser.integer("--tokens", f"largest number of tokens of an answer ({room})")
    parser.number("--temperature", "temperature; 0: the most likely token (0.8)", 0.8)
    parser.integer("--top-k", "sample from the K most likely tokens; 0: all (0)", 0, "K")
    share = "sample from the most likely tokens of this total probability (1)"
    parser.number("--top-p", share, 1.0, "P")
    parser.integer("--seed", "seed of the random numbers (0)", 0)
    add("--stop-ids", metavar="LIST", help="additional tokens that end an answer")
    parser.switch("--ignore-end", "ignore the model's own end tokens")
    parser.switch("--no-bos", "omit the token that begins a document")
    parser.integer("--batch", "prompts of a file per batch (8)", 8)
    default = f"as many as are needed; of a conversation, the model's, up to {TALK_TOKENS}"
    parser.integer("--context", f"number of tokens of prompt and answer to allocate memory for ({default})")
    add_flags(parser)
    return parser


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(word) for word in split_list(flag, text) or [text]]
    except ValueError:
        raise InputError(f"{flag}: expected ids separated by commas, found {text[:60]!r}") from None


def _prompt_of(line: str, where: str) -> str | Messages:
    """The prompt of a JSON line: a text, or the messages of a chat."""
    row = parse_json(line, where, {"prompt": (str, None), "messages": ([{}], None)})
    for key in ("prompt", "messages"):
        if row.get(key) is not None:
            return row[key]
    raise InputError(f'{where}: expected {{"prompt": TEXT}} or {{"messages": [...]}}, found {line[:60]}')


def read_prompts(name: str) -> dict[str, str | Messages]:
    """{file and line: prompt} of a file, or of standard input where it is -. Raises InputError."""
    content = sys.stdin.buffer.read() if name == "-" else read_bytes(Path(name))
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}: line {line}: expected UTF-8") from None
    found = {
        f"{name}: line {number}": line.removesuffix("\r")
        for number, line in enumerate(lines, 1)
        if line.strip()
    }
    if not found:
        raise InputError(f"{name}: expected a prompt per line, found none")
    if Path(name).suffix in (".jsonl", ".json"):
        return {where: _prompt_of(line, where) for where, line in found.items()}
    return dict(found)


class Session:
    """The settings of every answer, from the flags."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        self.text = TextModel(args.directory, args.template)
        longest = self.text.config.max_position_embeddings
        self.context = args.context or longest
        if self.context > longest:
            expected = f"at most {longest}, the model's longest sequence"
            raise InputError(f"--context: expected {expected}, found {args.context}")
        more = _ids(args.stop_ids, "--stop-ids") if args.stop_ids else []
        own = [] if args.ignore_end else self.text.stops
        self.stops = [*own, *(id for id in more if id not in own)]

    def encode(self, prompt: str | Messages) -> list[int]:
        if isinstance(prompt, str) and not self.args.chat:
            return self.text.encode(prompt, bos=not self.args.no_bos)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.args.system is not None:
            messages = [{"role": "system", "content": self.args.system}, *messages]
        return self.text.encode_chat(messages)

    def tokens(self, prompts: dict[str, list[int]]) -> int:
        """The largest number of tokens of an answer to any of the prompts. Raises InputError with the name of
        a prompt that is too long."""
        least = self.args.tokens or 1
        for where, ids in prompts.items():
            if len(ids) > self.room(least):
                expected = f"a prompt that leaves room for {least} tokens in a context of {self.context}"
                raise InputError(f"{where}: expected {expected}, found one of {len(ids)} tokens")
        return self.args.tokens or min(MOST_TOKENS, self.room(max(map(len, prompts.values()))))

    def room(self, tokens: int) -> int:
        # The last token of an answer takes no place in the context: it is not read again.
        return self.context - tokens + 1

    def load(self, sequences: int = 1, needed: int | None = None) -> Inference:
        """The model, with memory for --context, or for the tokens that are needed."""
        args, context = self.args, self.args.context or needed or self.context
        return Inference(self.text.directory, args.dtype, context, sequences, kernels=args.kernel)

    def stream(self, model: Inference, ids: list[int], count: int, out: TextIO) -> str:
        """Prints the answer as it is made; returns it. The token that ended it is not part of its text."""
        text, told = TextStream(self.text.decode), []

        def write(piece: str) -> None:
            told.append(piece)
            out.write(printable(piece))
            out.flush()

        def made(_: int, token: int) -> bool:
            if token not in self.stops:
                write(text.add(token))
            return True

        model.generate([ids], count, self.sampling, self.stops, made)
        write(text.end())
        return "".join(told)


def answer(session: Session, where: str, prompt: str | list[int], out: TextIO) -> None:
    """One answer: text to a text, ids to ids."""
    ids = session.encode(prompt) if isinstance(prompt, str) else prompt
    count = session.tokens({where: ids})
    model = session.load(needed=len(ids) + count - 1)
    if isinstance(prompt, str):
        session.stream(model, ids, count, out)
        print(file=out)
    else:
        made = model.generate([ids], count, session.sampling, session.stops)[0]
        print(",".join(map(str, made)), file=out)


def answer_file(session: Session, prompts: dict[str, str | Messages], out: TextIO) -> None:
    """A JSON line per prompt, in their order, each as soon as those before it are there."""
    ids = {}
    for where, prompt in prompts.items():
        try:
            ids[where] = session.encode(prompt)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    count = session.tokens(ids)
    step = min(session.args.batch, len(ids))
    model = session.load(step, needed=max(map(len, ids.values())) + count - 1)
    every, asked = list(ids.values()), list(prompts.values())
    for first in range(0, len(every), step):
        some = every[first : first + step]
        answers = model.generate(some, count, session.sampling, session.stops, first=first)
        for prompt, made in zip(asked[first : first + step], answers):
            ended = made[-1] in session.stops
            text = session.text.decode(made[:-1] if ended else made)
            row: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "messages": prompt, "text": text}
            row |= {"tokens": len(made), "ended_by": "stop" if ended else "length"}
            line = json.dumps(row, ensure_ascii=False)
            print(CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", line), file=out, flush=True)


def read_lines() -> Iterator[str]:
    """The lines of standard input; a terminal shows what to do, and a prompt sign."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits the line
    print("Type a message and press Enter; Ctrl-D ends the conversation.")
    with suppress(EOFError):
        while True:
            yield input("> ")
    print()


def talk(session: Session, lines: Iterable[str], out: TextIO) -> None:
    """A conversation: each line a message of the user's. Raises InputError once it is longer than the
    context; an answer before that may be cut off there."""
    messages: Messages = []
    _ = session.text.template  # without one, it ends here
    session.context = session.args.context or min(session.context, TALK_TOKENS)
    model = session.load()
    for line in lines:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        ids = session.encode(messages)
        room = session.room(len(ids))
        if room < 1:
            expected = f"at most {session.context} tokens, the context, found {len(ids)}"
            raise InputError(f"conversation: expected {expected}; start another or raise --context")
        count = min(session.args.tokens or MOST_TOKENS, room)
        text = session.stream(model, ids, count, out)
        messages.append({"role": "assistant", "content": text})
        out.write("\n")


def main() -> None:
    """`llamac chat` is `llamac generate --chat`."""
    args = _parser().parse_args()
    args.chat |= sys.argv[0] == "llamac chat"
    check_least(args, batch=1, tokens=1, context=1)
    for flag, value in (("--system", args.system), ("--template", args.template or None)):
        if value is not None and not args.chat:
            raise InputError(f"{flag}: expected it with --chat")
    single = args.prompt if args.prompt_ids is None else _ids(args.prompt_ids, "--prompt-ids")
    if single is None and args.prompts is None and not args.chat:
        single = ""
    prompts = read_prompts(args.prompts) if args.prompts else {}
    session = Session(args)
    if prompts:
        answer_file(session, prompts, sys.stdout)
    elif single is None:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # encode() refuses it
        talk(session, read_lines(), sys.stdout)
    else:
        answer(session, "--prompt" if isinstance(single, str) else "--prompt-ids", single, sys.stdout)
