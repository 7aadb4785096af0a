"""`--tensorboard`: export the metrics of finished or live runs to TensorBoard."""

import json
import math
import time
from pathlib import Path

from llamac.base.errors import requires
from llamac.report.log import RunLog
from llamac.report.metrics import Row, configuration, rows

EVERY = 5.0  # seconds between two looks at a live log


class TensorBoard:
    """Event files of a run in FOLDER/LABEL."""

    def __init__(self, log: RunLog, folder: Path, label: str):
        requires("tensorboard", "--tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary, self.tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self.log, self.last, self.writer = log, -1, EventFileWriter(str(folder / label))
        config = configuration(log).items()
        text = "\n".join(f"    {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config)
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

    def write(self, all_steps: bool) -> None:
        """Writes new rows; without all_steps not the last step, whose validation may still come."""
        steps = self.log.columns["step"]
        end = math.inf if all_steps or not steps.size else steps[-1]
        for row in rows(self.log, self.last):
            if row.step >= end:
                break
            self.last = row.step
            self.row(row)
        self.writer.flush()


def export(runs: dict[str, RunLog], folder: Path, follow: bool) -> None:
    """Writes the runs to --tensorboard; with --follow until Ctrl-C."""
    exports: dict[str, TensorBoard] = {}
    try:
        for label, log in runs.items():
            exports[label] = TensorBoard(log, folder, label)
        try:
            while follow:
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
            found.writer.close()
    for label, found in exports.items():
        print(f"{label}: exported up to step {max(found.last, 0)}")
