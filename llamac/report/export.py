"""`--tensorboard`, `--wandb`, `--mlflow`: the metrics of finished or live runs in other tools. Each library is
needed for its own flag alone."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Protocol

from llamac.errors import InputError
from llamac.report.log import RunLog
from llamac.report.metrics import Row, configuration, devices_of, rows

EVERY = 5.0  # seconds between two looks at a live log


class Sink(Protocol):
    def row(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _missing(package: str, flag: str) -> InputError:
    return InputError(f"{flag}: {package} is not installed: pip install {package}")


class TensorBoard:
    """Event files in `folder`, in a folder for each run."""

    def __init__(self, folder: Path, label: str, config: dict):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise _missing("tensorboard", "--tensorboard") from None
        self.event, self.summary, self.tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self.writer = EventFileWriter(str(folder / label))
        text = "\n".join(f"    {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
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
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "--wandb") from None
        self.run = wandb.init(name=label, config=config, reinit="create_new")

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
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.tracking.fluent import _get_experiment_id
        except ImportError:
            raise _missing("mlflow", "--mlflow") from None
        self.client, self.metric = MlflowClient(), Metric
        self.id = self.client.create_run(_get_experiment_id(), run_name=label).info.run_id
        params = [Param(_plain(key), str(value)[:500]) for key, value in config.items()]
        for k in range(0, len(params), 100):
            self.client.log_batch(self.id, params=params[k : k + 100])
        self.waiting: list = []

    def row(self, row: Row) -> None:
        at = int(1e3 * row.seconds)
        self.waiting += [self.metric(_plain(name), value, at, row.step) for name, value in row.numbers.items()]
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


def export(runs: dict[str, RunLog], args: argparse.Namespace) -> None:
    """Writes the runs to each tool that a flag names; with --follow until Ctrl-C."""
    sinks: dict[str, list[Sink]] = {label: [] for label in runs}
    last = dict.fromkeys(runs, -1)
    try:
        for label, log in runs.items():
            config = configuration(log)
            if args.tensorboard:
                sinks[label].append(TensorBoard(args.tensorboard, label, config))
            if args.wandb:
                sinks[label].append(Wandb(label, config))
            if args.mlflow:
                sinks[label].append(Mlflow(label, config))
        while True:
            for label, log in runs.items():
                for row in rows(log, args.devices or devices_of(log), last[label]):
                    last[label] = row.step
                    for sink in sinks[label]:
                        sink.row(row)
                for sink in sinks[label]:
                    sink.flush()
            if not args.follow:
                break
            time.sleep(EVERY)
            for log in runs.values():
                log.update()
    except KeyboardInterrupt:
        if not args.follow:
            raise
    finally:
        for sink in (sink for found in sinks.values() for sink in found):
            sink.close()
    for label, step in last.items():
        print(f"{label}: exported up to step {max(step, 0)}")
