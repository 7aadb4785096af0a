"""Logs for the tests of llamac.report, as a run writes them."""

import json

HOSTILE = "</script><script>alert(1)</script><!-- <b onload='x'> &amp; \u2028 \U0001f600"


def run_event(**more) -> dict:
    return {"event": "run", "time": "2026-11-23T09:00:00.000Z", "host": "h", "device": "D", "version": "0",
            "commit": "c", "origin": "fresh", "from": None, "parameters": 1200,
            "ranks": 1, "tokens_per_step": 2048} | more  # fmt: skip


def start_event(**more) -> dict:
    event = {"event": "start", "time": "2026-11-23T09:00:00.100Z", "model": "tiny"}
    return event | {"steps": 600, "lr": 0.003} | more


def step_event(step: int, **more) -> dict:
    return {"event": "step", "time": "2026-11-23T09:00:01.000Z", "step": step, "loss": 2 + 6 / step,
            "grad_norm": 1 + 1 / step, "lr": 1e-5 * step, "ms": 250.0, "tokens_per_s": 8192.0, "tflops": 0.1,
            "mfu": None, "gpu_mem_gib": 0.0, "gpu_percent": None, "rss_gib": 0.4, "system_mem_gib": 3.0,
            "cpu_percent": 190.0} | more  # fmt: skip


def write(folder, events: list[dict], end: str = ""):
    """A log as the C program writes it; `end` follows its last line."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in events]
    (folder / "log.jsonl").write_text("".join(lines) + end)
    return folder


def a_run(steps: int = 50) -> list[dict]:
    """Validation, a sample, a checkpoint, a spike, an evaluation and a resume with another learning rate."""
    return [
        run_event(), start_event(), {"event": "val", "step": 0, "loss": 8.3},
        *(step_event(k) for k in range(1, steps // 2 + 1)),
        {"event": "spike", "step": 20, "quantity": "loss", "found": 9.0, "expected": 3.0, "allowed": 4.0},
        {"event": "checkpoint", "time": "t", "step": steps // 2, "path": "out/step", "ms": 12.0},
        run_event(origin="resumed", **{"from": "out/step"}, tokens_per_step=4096), start_event(lr=0.001),
        *(step_event(k) for k in range(steps // 2 + 1, steps + 1)),
        {"event": "val", "step": steps, "loss": 2.5},
        {"event": "sample", "step": steps, "text": "Once"},
        {"event": "evaluation", "step": steps, "task": "piqa", "accuracy": 0.5, "accuracy_norm": 0.6,
         "questions": 100},
    ]  # fmt: skip
