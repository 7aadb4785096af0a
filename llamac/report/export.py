"""`--tensorboard`: export the metrics of finished or live runs to TensorBoard."""

import argparse
import json
import math
import time
from pathlib import Path

from llamac.base.errors import requires
from llamac.report.log import RunLog
from llamac.report.metrics import Row, configuration, rows

EVERY = 5.0  # seconds between two looks at a live log


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


class _Export:
    """One run on its way into its events."""

    def __init__(self, log: RunLog, to: TensorBoard, devices: int | None):
        self.log, self.to, self.devices, self.last = log, to, devices, -1

    def write(self, all_steps: bool) -> None:
        """Writes new rows; without all_steps not the last step, whose validation may still come."""
        steps = self.log.columns["step"]
        end = math.inf if all_steps or not steps.size else steps[-1]
        for row in rows(self.log, self.devices, self.last):
            if row.step >= end:
                break
            self.last = row.step
            self.to.row(row)
        self.to.flush()


def export(runs: dict[str, RunLog], args: argparse.Namespace) -> None:
    """Writes the runs to --tensorboard; with --follow until Ctrl-C."""
    exports: dict[str, _Export] = {}
    try:
        for label, log in runs.items():
            to = TensorBoard(args.tensorboard, label, configuration(log))
            exports[label] = _Export(log, to, args.devices)
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
        for found in exports.values():
            found.to.close()
    for label, found in exports.items():
        print(f"{label}: exported up to step {max(found.last, 0)}")
