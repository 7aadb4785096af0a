"""`llamac COMMAND ...` and `python -m llamac COMMAND ...` run `python -m llamac.COMMAND`."""

import os
import runpy
import shutil
import sys

from llamac.errors import InputError, run

COMMANDS = {
    "train FLAGS": "trains a model with the program train_llama3",
    "data INPUT --out DIR": "writes token files from text, JSON lines or Parquet",
    "finetune DIR DATA --out OUT": "trains a model on the answers of chats",
    "generate DIR --prompt TEXT": "generates text with a model; --chat for a conversation",
    "eval DIR --tasks LIST": "computes scores of hellaswag, mmlu, arc, piqa, winogrande; bits per byte",
    "export gguf DIR FILE": "exports a model for llama.cpp and related programs",
    "checkpoint list OUT": "lists the checkpoints of a run and their state; verify OUT|DIR: every file",
    "report OUT [OUT2 ...]": "makes an HTML page of runs, also live (--serve); TensorBoard, W&B, MLflow",
    "plot OUT": "draws OUT/loss.png from a run's OUT/log.jsonl",
    "profile OUT": "shows how a run with --profile spent its time, with advice",
    "bench": "times llamac.ops, PyTorch eager, torch.compile and Liger: tables, JSON, charts",
    "doctor": "checks the installation and says what to do",
    "completion bash|zsh": "prints a shell script that completes commands and flags",
}


def usage() -> str:
    import llamac

    width = max(map(len, COMMANDS))
    lines = [f"llamac {llamac.__version__}", ""]
    lines += [f"  llamac {command.ljust(width)}  {purpose}" for command, purpose in COMMANDS.items()]
    lines += ["", "Each command has --help. `python -m llamac.COMMAND` is the same, except for train."]
    lines += ["In Python: llamac.Trainer, llamac.ops, llamac.patch, llamac.kernels, llamac.run."]
    return "\n".join(lines)


def train(arguments: list[str]) -> None:
    """Executes the program of the working folder, where `make train_llama3` puts it, or of PATH."""
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
        sys.argv = [command, *arguments]  # runpy replaces the first by the module's file
        runpy.run_module(f"llamac.{command}", run_name="__main__", alter_sys=True)
    else:
        print(f"llamac: {command}: no such command; expected one of these:\n\n{usage()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
