"""`llamac COMMAND ...`, or `python -m llamac COMMAND ...`: runs `python -m llamac.COMMAND`."""

import os
import runpy
import shutil
import sys

from llamac.errors import InputError, run

COMMANDS = {
    "train FLAGS": "trains a model: the program train_llama3",
    "data INPUT --out DIR": "tokens of text, JSON lines, Parquet, to train on",
    "finetune DIR DATA --out OUT": "trains a model on the answers of chats",
    "generate DIR --prompt TEXT": "what the model of a directory answers; --chat talks to it",
    "eval DIR --tasks LIST": "scores in hellaswag, mmlu, arc, piqa, winogrande; bits per byte of texts",
    "export gguf DIR FILE": "a model for llama.cpp and its relatives",
    "checkpoint list OUT": "the checkpoints of a run and their state; verify OUT|DIR: each file",
    "report OUT [OUT2 ...]": "an HTML page of runs, also live (--serve); TensorBoard, W&B, MLflow",
    "plot OUT": "draws OUT/loss.png from a run's OUT/log.jsonl",
    "profile OUT": "where the time of a run with --profile went, and what to do next",
    "bench": "llamac.ops beside PyTorch eager, torch.compile and Liger: tables, JSON, charts",
    "doctor": "what is installed, whether it fits together, and what to do if not",
    "completion bash|zsh": "completion of commands and flags, for the shell to evaluate",
}


def usage() -> str:
    import llamac

    width = max(map(len, COMMANDS))
    lines = [f"llamac {llamac.__version__}", ""]
    lines += [f"  llamac {command.ljust(width)}  {purpose}" for command, purpose in COMMANDS.items()]
    lines += ["", "Each has --help. `python -m llamac.COMMAND` is the same, except for train."]
    lines += ["In Python: llamac.Trainer, llamac.ops, llamac.patch, llamac.kernels, llamac.run."]
    return "\n".join(lines)


def train(arguments: list[str]) -> None:
    """Becomes the program: of the working folder, where `make train_llama3` leaves it, else of PATH."""
    program = shutil.which("./train_llama3") or shutil.which("train_llama3")
    if not program:
        raise InputError(
            "train: expected the program train_llama3 in the working folder or on PATH, found neither: "
            "`make train_llama3` builds it, `make install` installs it"
        )
    os.execv(program, [program, *arguments])


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        print(usage())
    elif command == "--version":
        print(usage().splitlines()[0])
    elif command == "train":
        run(lambda: train(arguments))
    elif command in (known.split()[0] for known in COMMANDS):
        sys.argv = [command, *arguments]  # runpy puts the module's file in the place of the first
        runpy.run_module(f"llamac.{command}", run_name="__main__", alter_sys=True)
    else:
        print(f"llamac: {command}: no such command; expected one of these:\n\n{usage()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
