"""`--tensorboard`, `--wandb`, `--mlflow`: export the metrics of finished or live runs to other tools. Each
flag needs only its own library.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Protocol

from llamac.base.errors import InputError, requires
from llamac.report.log import RunLog
from llamac.report.metrics import Row, configuration, rows

EVERY = 5.0  # seconds between two looks at a live log


class Sink(Protocol):
    def row(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder`, in a folder for each run."""

    def __init__(self, folder: Path, label: str, config: dict):
        requires("tensorboard", "--tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary, self.tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self.writer = EventFileWriter(str(folder / label))
        text = "\n".join(
            f"    {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()
        )
        self.row(Row(0, time.time(), {}, {"configuration": text}))

    def row(self, row: Row) -> None:
        values = [self.summary.Summary.Value(tag=tag, simple_value=v) for tag, v in row.numbers.items()]
        plugin = self.summary.SummaryMetadata(plugin_data={"plugin_name": "text"})
        for tag, text in row.texts.items():
            content = text.encode("utf-8", errors="replace")
            tensor = self.tensor(dtype="DT_STRING", string_val=[content], tensor_shape={"dim": [{"size": 1}]})
            values.append(self.summary.Summary.Value(tag=tag, tensor=tensor, metadata=plugin))
        summary = self.summary.Summary(value=values)
        self.writer.add_event(self.event(wall_time=row.seconds, step=row.step, summary=summary))

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases; its own environment variables choose project, mode and folder."""

    def __init__(self, label: str, config: dict):
        self.run = requires("wandb", "--wandb").init(name=label, config=config, reinit="create_new")

    def row(self, row: Row) -> None:
        self.run.log({**row.numbers, **row.texts}, step=row.step)

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """A run of MLflow, in the experiment and store that its environment variables name. Names have no
    brackets and no % there: mfu(%) is mfu_percent, throughput(tps) is throughput_tps."""

    MOST = 1000  # metrics per request

    def __init__(self, label: str, config: dict):
        mlflow = requires("mlflow", "--mlflow")
        from mlflow.entities import Metric, Param

        try:
            self.client, self.metric = mlflow.MlflowClient(), Metric
            with mlflow.start_run(run_name=label) as run:  # in the experiment of the environment
                self.id = run.info.run_id
        except mlflow.exceptions.MlflowException as error:
            raise InputError(f"--mlflow: cannot start a run: {error}") from None
        self.client.update_run(self.id, status="RUNNING")
        params = [Param(_plain(key), str(value)[:500]) for key, value in config.items()]
        for k in range(0, len(params), 100):
            self.client.log_batch(self.id, params=params[k : k + 100])
        self.waiting: list = []

    def row(self, row: Row) -> None:
        at = int(1e3 * row.seconds)
        self.waiting += [
            self.metric(_plain(name), value, at, row.step) for name, value in row.numbers.items()
        ]
        for name, text in row.texts.items():
            self.client.log_text(self.id, text, f"{name}_{row.step:06d}.txt")
        if len(self.waiting) >= self.MOST:
            self.flush()

    def flush(self) -> None:
        for k in range(0, len(self.waiting), self.MOST):
            self.client.log_batch(self.id, metrics=self.waiting[k : k + self.MOST])
        self.waiting = []

    def close(self) -> None:
        self.flush()
        self.client.set_terminated(self.id)


def _plain(name: str) -> str:
    """A name as MLflow takes it."""
    name = name.replace("(%)", "_percent")
    return re.sub(r"[^\w./ -]", "_", re.sub(r"\((\w+)\)", r"_\1", name))


def _sinks(label: str, log: RunLog, args: argparse.Namespace) -> list[Sink]:
    config = configuration(log)
    sinks: list[Sink] = []
    if args.tensorboard:
        sinks.append(TensorBoard(args.tensorboard, label, config))
    if args.wandb:
        sinks.append(Wandb(label, config))
    if args.mlflow:
        sinks.append(Mlflow(label, config))
    return sinks


class _Export:
    """One run on its way into its sinks."""

    def __init__(self, log: RunLog, sinks: list[Sink], devices: int | None):
        self.log, self.sinks, self.devices, self.last = log, sinks, devices, -1

    def write(self, all_steps: bool) -> None:
        """Writes new rows; without all_steps not the last step, whose validation may still come."""
        steps = self.log.columns["step"]
        end = math.inf if all_steps or not steps.size else steps[-1]
        for row in rows(self.log, self.devices, self.last):
            if row.step >= end:
                break
            self.last = row.step
            for sink in self.sinks:
                sink.row(row)
        for sink in self.sinks:
            sink.flush()


def export(runs: dict[str, RunLog], args: argparse.Namespace) -> None:
    """Writes the runs to each tool that a flag names; with --follow until Ctrl-C."""
    exports: dict[str, _Export] = {}
    try:
        for label, log in runs.items():
            exports[label] = _Export(log, _sinks(label, log, args), args.devices)
        try:
            while args.follow:
                for found in exports.values():
                    found.write(all_steps=False)
                time.sleep(EVERY)
                for log in runs.values():
                    log.update()
        except KeyboardInterrupt:
            print()
        for found in exports.values():
            found.write(all_steps=True)
    finally:
        for sink in (sink for found in exports.values() for sink in found.sinks):
            sink.close()
    for label, found in exports.items():
        print(f"{label}: exported up to step {max(found.last, 0)}")
