"""The loss and gradient of TRL's SFTTrainer on the same conversations, where trl is installed: make test does
not install it."""

import json
from pathlib import Path

import pytest
from hf_dirs import TEXT, write_directory
from run import events, run_llamac

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

T = 64
# As hf_dirs.TEMPLATE, with the blocks by which TRL knows answers.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content | trim }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = TEXT.split()


def text(begin: int, count: int) -> str:
    return " ".join(WORDS[(begin + i) % len(WORDS)] for i in range(count))


def chats() -> list[dict]:
    """Of one to three questions, some behind a system's message."""
    rows = []
    for i in range(9):
        messages = [{"role": "system", "content": text(i, 2)}] if i % 2 else []
        for turn in range(1 + i % 3):
            messages += [
                {"role": "user", "content": text(i + turn, 1 + i % 4)},
                {"role": "assistant", "content": text(5 * i + turn, 2 + (i + turn) % 5)},
            ]
        rows.append({"messages": messages})
    return rows


ROWS = {
    "chats": chats(),
    "texts": [{"prompt": text(i, 2 + i), "completion": " " + text(3 * i, 1 + i % 6)} for i in range(9)],
    "answers": [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in chats()],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = write_directory(tmp_path_factory.mktemp("model"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def of_trl(directory: Path, rows: list[dict], out: Path) -> tuple[float, float]:
    """Loss of one batch of all rows, and its gradient's norm, in float32."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(out),
        max_length=T,
        packing=True,
        assistant_only_loss="messages" in rows[0],
        loss_type="nll",
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    made = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    (inputs,) = made.get_train_dataloader()
    assert int((inputs["position_ids"] == 0).sum()) == len(rows) and "attention_mask" not in inputs
    loss = made.compute_loss(made.model.train(), inputs)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters()])
    return loss.item(), norm.item()


@pytest.mark.program
@pytest.mark.parametrize("kind", list(ROWS))
def test_packed(directory, tmp_path, train, kind):
    """The program on token files, beside TRL's packing, whose position_ids keep documents apart."""
    loss, norm = of_trl(directory, ROWS[kind], tmp_path / "trl")
    data, folder, out = tmp_path / "rows.jsonl", tmp_path / "packed", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    made = run_llamac("finetune", directory, data, "--prepare", folder, "--seq-len", T)
    sequences = int(made.stdout.split(f"{folder}: train: ")[1].split()[0])
    assert sequences < len(ROWS[kind])
    flags = ["--model", directory, "--train-data", f"{folder}/train_*.bin", "--val-data", "none"]
    flags += ["--seq-len", str(T), "--batch-size", str(sequences), "--document-mask", "on", "--dtype", "f32"]
    flags += ["--steps", "1", "--sample-every", "0", "--checkpoint-every", "-1", "--out", out]
    train(*flags)
    (step,) = events(out, "step")
    assert step["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
