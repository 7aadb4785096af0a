"""`python -m llamac`: the commands of this package."""

COMMANDS = {
    "doctor": "what is installed, whether it fits together, and what to do if not",
    "bench": "llamac.ops beside PyTorch eager, torch.compile and Liger: tables, JSON, charts",
    "profile OUT": "where the time of a run with --profile went, and what to do next",
    "checkpoint list OUT": "the checkpoints of a run and their state; verify OUT|DIR: each file",
    "report OUT [OUT2 ...]": "an HTML page of runs, also live (--serve); TensorBoard, W&B, MLflow",
    "plot OUT": "draws OUT/loss.png from a run's OUT/log.jsonl",
    "generate DIR --prompt TEXT": "what the model of a directory answers; --chat talks to it",
    "eval DIR --tasks LIST": "scores in hellaswag, mmlu, arc, piqa, winogrande; bits per byte of texts",
    "finetune DIR DATA --out OUT": "trains a model on the answers of chats",
    "export gguf DIR FILE": "a model for llama.cpp and its relatives",
    "data INPUT --out DIR": "tokens of text, JSON lines, Parquet, to train on",
}


def main() -> None:
    import llamac

    width = max(map(len, COMMANDS))
    print(f"llamac {llamac.__version__}\n")
    for command, purpose in COMMANDS.items():
        print(f"  python -m llamac.{command.ljust(width)}  {purpose}")
    print(
        "\nEach has --help. In Python: llamac.Trainer, llamac.ops, llamac.patch, llamac.kernels, llamac.run."
    )


if __name__ == "__main__":
    main()
