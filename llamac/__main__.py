"""`llamac COMMAND ...` and `python -m llamac COMMAND ...` call main() of the command's module."""

import sys
from importlib import import_module
from typing import NamedTuple

from llamac import __version__
from llamac.base.arguments import fill
from llamac.base.errors import run


class Command(NamedTuple):
    arguments: str
    module: str  # below llamac
    purpose: str


COMMANDS = {
    "train": Command("FLAGS", "training.program", "trains a model with the program train_llama3"),
    "plan": Command(
        "--model MODEL --devices N",
        "training.plan",
        "searches for the fastest flags that fit, and estimates days",
    ),
    "data": Command("INPUT --out DIR", "data.command", "writes token files from text, JSON lines or Parquet"),
    "model": Command(
        "--depth L --tokenizer DATA --out DIR", "model.make", "writes the config.json of a new model"
    ),
    "finetune": Command("DIR DATA --out OUT", "training.finetune", "trains a model on the answers of chats"),
    "generate": Command("DIR --prompt TEXT", "inference.generate", "generates text with a model"),
    "chat": Command("DIR", "inference.generate", "talks to a model in the terminal, with its chat template"),
    "serve": Command("DIR", "serve.command", "serves OpenAI's API and a chat page over HTTP"),
    "eval": Command(
        "DIR --tasks LIST",
        "eval.command",
        "computes scores of hellaswag, mmlu, arc, piqa, winogrande; bits per byte",
    ),
    "export": Command(
        "gguf|hf|merge DIR FILE|OUT",
        "inference.export",
        "exports a model for llama.cpp, or for Hugging Face with a model card",
    ),
    "checkpoint": Command(
        "list OUT",
        "model.checkpoint",
        "lists the checkpoints of a run and their state; verify OUT|DIR: every file",
    ),
    "report": Command(
        "OUT [OUT2 ...]",
        "report.command",
        "makes an HTML page of runs, also live (--serve); exports to TensorBoard",
    ),
    "plot": Command("OUT", "report.plot", "draws OUT/loss.png from a run's OUT/log.jsonl"),
    "profile": Command(
        "OUT", "profile.profile", "shows how a run with --profile spent its time, with advice"
    ),
    "bench": Command(
        "", "bench.command", "times llamac.ops, PyTorch eager and torch.compile: tables, JSON, charts"
    ),
    "doctor": Command("", "doctor.command", "checks the installation and says what to do"),
    "completion": Command(
        "bash|zsh", "completion", "prints a shell script that completes commands and flags"
    ),
}


def usage() -> str:
    calls = {name: f"{name} {command.arguments}" for name, command in COMMANDS.items()}
    width = max(map(len, calls.values()))
    lines = [f"  llamac {call.ljust(width)}  {COMMANDS[name].purpose}" for name, call in calls.items()]
    more = "In Python: llamac.Trainer, llamac.ops, llamac.patch, llamac.kernels, llamac.run."
    end = f"Each command has --help. `python -m llamac COMMAND` is the same.\n{more}"
    return fill("\n".join([f"llamac {__version__}", "", *lines, "", end]))


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
    elif name == "--version":
        print(usage().splitlines()[0])
    elif name in COMMANDS:
        sys.argv = [f"llamac {name}", *arguments]  # argparse and errors name the command by the first
        try:
            run(lambda: sys.exit(import_module(f"llamac.{COMMANDS[name].module}").main()))
        except KeyboardInterrupt:
            sys.exit(130)
    else:
        print(f"llamac: {name}: no such command; expected one of these:\n\n{usage()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
