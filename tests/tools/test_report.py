"""llamac report: reading logs, reducing curves, the page's content, serving and exporting it. The
page in a browser: test_report_page.py."""

import json
import math
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from launch import needs
from report_logs import HOSTILE, a_run, run_event, start_event, step_event, write
from run import ROOT, flags, refused, refuses

from llamac.base.errors import InputError
from llamac.report import command as program
from llamac.report import content, export, metrics, page, serve
from llamac.report.log import RunLog, read, spread
from llamac.report.plot import labels
from llamac.report.reduce import difference, kept, rounded, stretches
from llamac.report.summary import live

# Reading


def test_the_order_of_fields_means_nothing(tmp_path):
    device = {"watts": 650.5, "celsius": 61.0, "clock_mhz": 1755.0}
    events = [*a_run(), step_event(51, loss=None, skipped=True, device=device), step_event(52, extra=[1])]
    log = read(write(tmp_path, events))
    turned = read(write(tmp_path, [dict(reversed(event.items())) for event in events]))
    assert log.events == turned.events and log.skipped == turned.skipped == [51]
    for name, values in turned.columns.items():
        np.testing.assert_array_equal(log.columns[name], values)
    assert log.columns["device.watts"][50] == 650.5 and math.isnan(log.columns["loss"][50])


def test_what_python_writes(tmp_path):
    """With spaces behind colons and commas."""
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in a_run()))
    assert read(tmp_path).columns["step"].tolist() == list(range(1, 51))
    assert read(tmp_path / "log.jsonl").events == read(tmp_path).events


def test_a_live_log(tmp_path):
    """A line without its end is read when it is complete."""
    line = json.dumps(step_event(51), separators=(",", ":")) + "\n"
    write(tmp_path, a_run(), line[:40])
    log = read(tmp_path)
    assert log.columns["step"][-1] == 50 and not log.update()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(line[40:])
    assert log.update() and log.columns["step"][-1] == 51 and not log.update()


def test_a_log_that_a_resumed_run_cut(tmp_path):
    log = read(write(tmp_path, a_run()))
    write(tmp_path, a_run()[:20])
    assert log.update() and log.columns["step"].tolist() == list(range(1, 18))
    (tmp_path / "log.jsonl").unlink()
    write(tmp_path, [run_event(host="another machine"), *(step_event(k) for k in range(1, 60))])
    assert log.update() and log.columns["step"].size == 59 and len(log.events) == 1


def test_a_step_twice_counts_as_it_was_written_last(tmp_path):
    log = read(write(tmp_path, [step_event(k) for k in (1, 2, 3)] + [step_event(2, loss=7.0)]))
    assert log.columns["step"].tolist() == [1, 2, 3] and log.columns["loss"][1] == 7.0


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (step_event(3) | {"step": -1}, "Expected `int` >= 0 - at `$.step`"),
        (step_event(3) | {"step": 2.5}, "Expected `int`, got `float` - at `$.step`"),
        (step_event(3) | {"step": None}, "Expected `int`, got `null` - at `$.step`"),
        (step_event(3, loss="1.5"), "Expected `float | null`, got `str` - at `$.loss`"),
        (step_event(3, grad_norm=[1]), "Expected `float | null`, got `array` - at `$.grad_norm`"),
        (step_event(3, ms=10**400), "Number out of range - at `$.ms`"),
        (step_event(3, device=[1]), "Expected `object`, got `array` - at `$.device`"),
        (step_event(3, device={"watts": "hot"}), "Expected `float | null`, got `str` - at `$.device.watts`"),
    ],
)
def test_bad_steps(tmp_path, event, expected):
    write(tmp_path, [*a_run(), event, step_event(4)])
    assert refused(read, tmp_path) == f"{tmp_path / 'log.jsonl'}: line {len(a_run()) + 1}: {expected}"


@pytest.mark.parametrize("line", ['{"event":"step",', "[1]", "\0\0", "[" * 5000, '{"a": 1}}'])
def test_broken_lines(tmp_path, line):
    """The last one is what a run left that died; any other is an error that names it."""
    assert read(write(tmp_path, a_run(), line + "\n")).columns["step"].size == 50
    write(tmp_path, a_run(), line + "\n" + json.dumps(step_event(51)) + "\n")
    assert f"log.jsonl: line {len(a_run()) + 1}: expected a JSON object" in refused(read, tmp_path)


def test_nothing_to_read(tmp_path):
    assert "cannot open" in refused(read, tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert "expected the log of a run, found no event" in refused(read, tmp_path)


def test_tokens_and_hours(tmp_path):
    """The tokens of a step change where the run was resumed with another batch."""
    log = read(write(tmp_path, a_run()))
    assert log.tokens()[[0, 24, 25, 49]].tolist() == [2048, 25 * 2048, 25 * 2048 + 4096, 25 * (2048 + 4096)]
    assert log.hours()[-1] == pytest.approx(50 * 0.25 / 3600)
    late = read(write(tmp_path, [run_event(), step_event(101), step_event(102)]))
    assert late.tokens().tolist() == [101 * 2048, 102 * 2048]  # it went on from a checkpoint elsewhere


# Reducing


@pytest.mark.parametrize("n", [1, 2, 100, 101, 999, 1003, 54321])
def test_reduction_keeps_extremes(n):
    values = np.random.default_rng(n).standard_normal(n)
    values[n // 3] = 50.0
    values[n // 2 :: 7] = np.nan
    chosen = kept(values, 100)
    assert chosen.size <= 102 and np.all(np.diff(chosen) > 0) and {0, n - 1} <= set(chosen.tolist())
    for extreme in (np.nanmin, np.nanmax) if np.isfinite(values).any() else ():
        assert extreme(values) == extreme(values[chosen])
    length = math.ceil(n / 50)
    for begin in range(0, n if n > 100 else 0, length):
        part = values[begin : begin + length]
        if np.isfinite(part).any():
            assert {begin + np.nanargmin(part), begin + np.nanargmax(part)} <= set(chosen.tolist())


def test_a_gap_stays_a_gap():
    values = np.ones(1000)
    values[400:500] = np.nan
    assert None in rounded(values[kept(values, 100)])


def test_stretches_have_the_mean_of_what_is_known():
    values = np.arange(10.0)
    values[[0, 4, 5]] = np.nan
    np.testing.assert_array_equal(stretches(values, 5), [1, 2.5, np.nan, 6.5, 8.5])


def test_difference():
    steps, values = difference(
        ([1, 3, 4], [1.0, 2.0, 5.0]), (np.array([3, 4, 9]), np.array([2.0, np.nan, 0]))
    )
    assert steps.tolist() == [3, 4] and values[0] == 0 and math.isnan(values[1])


def test_spread():
    assert spread([1, 2, 3], 3) == [1, 2, 3] and spread(list(range(100)), 4) == [0, 33, 66, 99]


def test_many_steps_are_few_points(tmp_path):
    events = [run_event(), start_event(), *(step_event(k) for k in range(1, 20001))]
    found = content.report({"r": read(write(tmp_path, events))})["runs"][0]
    assert max(len(c["raw"][0]) for c in found["curves"].values()) <= 2002
    (steps, means), n = found["curves"]["loss"]["mean"], np.arange(1, 11)
    assert len(steps) == 2000 and means[0] == pytest.approx((2 + 6 / n).mean(), rel=1e-5)
    assert len(found["axis"]["step"]) == 1000 and found["axis"]["tokens"][-1] == 20000 * 2048


@pytest.mark.slow
def test_a_million_steps(tmp_path, library):
    """It took 2.7 and 3.9 s of CPU time on an AMD EPYC; the limit leaves room for slower machines."""
    line = json.dumps(step_event(1), separators=(",", ":")).replace('"step":1,', '"step":@,')
    with open(tmp_path / "log.jsonl", "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in (run_event(), start_event()))
        file.writelines(line.replace("@", str(k)) + "\n" for k in range(1, 1_000_001))
    begin = time.process_time()
    log = read(tmp_path)
    text = page.render(content.report({"r": log}))
    seconds = time.process_time() - begin
    print(f"{seconds:.1f} s of CPU time, {len(text):,} characters")
    assert log.columns["step"].size == 1_000_000 and len(text) < 1_000_000
    assert seconds < 10


# Content


def test_content(tmp_path):
    found = content.report({"a": read(write(tmp_path, a_run()))})["runs"][0]
    assert found["curves"].keys() == {
        "loss", "lr", "grad_norm", "tokens_per_s", "tflops", "rss_gib", "system_mem_gib",
        "cpu_percent", "validation", "evaluation piqa"}  # fmt: skip
    assert found["curves"]["validation"]["raw"] == [[0, 50], [8.3, 2.5]] and found["ranks"] is None
    assert found["evaluations"] == {"piqa": [[50, 0.5, 0.6, 100]]} and found["samples"] == [[50, "Once"]]
    assert [event[:1] + event[2:3] for event in found["events"]] == [
        [0, "start"], [20, "spike"], [25, "checkpoint"], [25, "resume"]]  # fmt: skip
    assert found["events"][1][3] == "loss 9, expected about 3, at most 4"
    assert found["events"][2][3] == "out/step, training stood still for 12 ms"
    assert "changed: lr: 0.003 → 0.001" in found["events"][3][3]
    assert {name: text for name, text, _ in found["summary"]} == {
        "model": "tiny", "parameters": "1.2K", "device": "D", "steps": "50 of 600", "tokens": "154K",
        "training loss": "2.1200", "validation loss": "2.5000", "best validation loss": "2.5000",
        "best at step": "50", "tokens/s (median)": "8,192", "time in steps": "12 s"}  # fmt: skip
    missing = " ".join(found["missing"])
    assert all(word in missing for word in ("MFU", "GPU memory", "power", "temperature"))
    assert found["profile"] is None and "profile: the run had no --profile" in missing


def test_differences(tmp_path):
    first = read(write(tmp_path / "a", [run_event(), start_event(only=1)]))
    second = read(write(tmp_path / "b", [run_event(host="g"), start_event(lr=0.006)]))
    rows = content.report({"a": first, "b": second})["configuration"]
    assert {row[0]: row[2:] for row in rows if row[1]} == {
        "host": ["h", "g"], "lr": ["0.003", "0.006"], "only": ["1", ""]}  # fmt: skip
    assert ["model", False, "tiny", "tiny"] in rows


def clock(seconds: float) -> str:
    return f"2026-11-23T09:{seconds // 60:02.0f}:{seconds % 60:06.3f}Z"


def test_figures_of_a_run(tmp_path):
    """Wall time without the pause before the resume; the least of the validations; all ranks' energy."""
    sensors = {"watts": 500.0, "celsius": 60.0}
    ranks = [{"host": "h", "cpu_percent": 90.0, "device": {"watts": watts}} for watts in (500.0, 300.0)]
    run = {"ranks": 2, "tokens_per_epoch": 4096}
    events = [
        run_event(time=clock(0), **run), start_event(time=clock(0), steps=100),
        *(step_event(k, time=clock(10 * k), ms=9000.0, device=sensors) for k in (1, 2)),
        {"event": "ranks", "time": clock(20), "step": 2, "ranks": ranks},
        {"event": "val", "time": clock(23), "step": 2, "loss": 3.0, "bits_per_byte": 1.5},
        run_event(time=clock(600), **run), start_event(time=clock(600), steps=100),
        *(step_event(k, time=clock(600 + 10 * (k - 2)), ms=9000.0, device=sensors) for k in (3, 4)),
        {"event": "val", "time": clock(645), "step": 4, "loss": 3.5, "bits_per_byte": 1.75}]  # fmt: skip
    log = read(write(tmp_path, events))
    found = content.report({"a": log})["runs"][0]
    figures = {name: number for name, _, number in found["summary"]}
    assert figures["wall time"] == pytest.approx(23 + 45) and figures["epochs"] == 4 * 2048 / 4096
    assert (figures["best validation loss"], figures["best at step"], figures["validation loss"]) == (
        3,
        2,
        3.5,
    )
    assert figures["best bits per byte"] == 1.5
    assert figures["energy of the GPUs, kWh"] == pytest.approx(800 * 36 / 3.6e6)
    assert found["ranks"] == {"steps": [2], "hosts": ["h", "h"], "readings": {
        "device.watts": [[500.0, 300.0]], "cpu_percent": [[90.0, 90.0]]}}  # fmt: skip
    updated = 1795424400.0 + 645
    assert live(log) == pytest.approx({"updated": updated, "step": 9.0, "pause": 25.0, "left": 96 * 9.0})
    one = read(write(tmp_path, [run_event(), step_event(1, device=sensors), step_event(2)]))
    assert live(one)["left"] is None
    assert dict((row[0], row[2]) for row in content.report({"a": one})["runs"][0]["summary"])[
        "energy of the GPUs, kWh"] == pytest.approx(500 * 0.5 / 3.6e6)  # fmt: skip


def test_runs_that_coincide(tmp_path):
    """Each has its difference to the first, at the steps of both; equal curves are zeros."""
    first = read(write(tmp_path / "a", a_run()))
    same, shorter = read(write(tmp_path / "b", a_run())), read(write(tmp_path / "c", a_run(20)))
    runs = content.report({"a": first, "b": same, "c": shorter})["runs"]
    curves = [run["curves"] for run in runs]
    assert "loss_difference" not in curves[0] and not any(curves[1]["loss_difference"]["raw"][1])
    assert curves[1]["validation_difference"]["raw"] == [[0, 50], [0.0, 0.0]]
    assert curves[2]["loss_difference"]["raw"][0] == list(range(1, 21))


def test_labels():
    assert labels(["out/a", "out/b/"]) == ["a", "b"]
    assert labels(["x/out", "y/out/log.jsonl"]) == ["x/out", "y/out"]
    assert labels([".", "..", "/"]) == [Path.cwd().name, Path.cwd().parent.name or "run", "run"]
    first, second = labels(["out", "out"])
    assert first.endswith("/out (1)") and second.endswith("/out (2)")


def test_profile(tmp_path):
    write(tmp_path, a_run())
    row = {"operation": "matmul_forward", "variant": "library", "calls": 8, "seconds": 0.4, "flops": 2e11,
           "bytes": 1e6, "shapes": []}  # fmt: skip
    values = {"device": {"name": "D", "gpu": True, "peak_tflops": 1.0, "copy_gbps": 100.0}, "steps": 4,
              "seconds": 1.0, "idle_seconds": 0.1, "operations": [row]}  # fmt: skip
    (tmp_path / "profile.json").write_text(json.dumps(values))
    found = content.report({"a": read(tmp_path)})["runs"][0]["profile"]
    assert found["rows"] == [{"name": "matmul_forward (library)", "category": "GEMM", "ms": 100.0,
                              "share": 0.4, "calls": 2.0, "limit_ms": 50.0, "by": "compute"}]  # fmt: skip
    assert found["shares"] == [["GEMM", 100.0, 0.4], ["idle", 25.0, 0.1]] and found["advice"]
    (tmp_path / "profile.json").write_text("{")
    found = content.report({"a": read(tmp_path)})["runs"][0]
    assert found["profile"] is None and "profile.json: expected JSON" in found["missing"][-1]


def test_events_of_odd_types_are_left_out(tmp_path):
    odd = [
        {"event": "val", "step": "x", "loss": 1}, {"event": "val", "step": 1, "loss": None}, {"event": 5}, {},
        {"event": "sample", "step": 1, "text": 3}, {"event": "spike", "step": 1}, {"event": "checkpoint"},
        {"event": "evaluation", "step": 1, "task": ["t"], "accuracy": 1},
        {"event": "run", "tokens_per_step": "x", "tokens_per_epoch": None, "time": 5},
        {"event": "saturated", "step": 1, "share": "x"}, {"event": "ranks", "step": 1, "ranks": 2},
        {"event": "ranks", "step": 1, "ranks": [5, {"device": 7, "cpu_percent": "x"}]},
        {"event": "start", "model": None, "steps": "many"},
    ]  # fmt: skip
    log = read(write(tmp_path, [*odd, step_event(1)]))
    found = content.report({"a": log})
    assert "validation" not in found["runs"][0]["curves"] and found["runs"][0]["samples"] == []
    assert found["runs"][0]["ranks"]["readings"] == {}
    page.as_json(found)
    assert [row.step for row in metrics.rows(log)] == [1]


# The page


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(page, "library", lambda: "LIBRARY")


def test_hostile_text(tmp_path, library):
    """Nothing that a log says leaves the element that holds the data."""
    events = [run_event(device=HOSTILE), start_event(**{HOSTILE: HOSTILE, "model": HOSTILE}), step_event(1)]
    events.append({"event": "sample", "step": 1, "text": HOSTILE + " @SCRIPT@"})
    found = content.report({HOSTILE: read(write(tmp_path, events))})
    text = page.render(found)
    assert text.count("<script") == text.count("</script>") == 3 and "alert(1)</script>" not in text
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(data)["runs"] == json.loads(page.as_json(found))["runs"]
    assert "<title>&lt;/script&gt;" in text
    page.render(content.report({"folder\udcff": read(tmp_path)})).encode()  # a name that is not UTF-8


def test_the_file_needs_no_network(tmp_path, library):
    """And is small: of a run of 600 steps whose every number has all its digits."""
    random = np.random.default_rng(1).random
    events = [
        {k: v * (1 + random()) if type(v) is float else v for k, v in event.items()} for event in a_run(600)
    ]
    text = page.render(content.report({"a": read(write(tmp_path, events))}))
    assert "http://" not in text and "https://" not in text and " src=" not in text
    assert "default-src &#x27;none&#x27;" in text and "connect-src" not in text
    assert len(text) < 500_000


def program_of(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    program.main()


def test_the_command(tmp_path, monkeypatch, capsys, library):
    write(tmp_path / "a", a_run())
    program_of(monkeypatch, tmp_path / "a")
    assert capsys.readouterr().out.strip() == str(tmp_path / "a/report.html")
    program_of(monkeypatch, tmp_path / "a/log.jsonl", tmp_path / "a", "--to", tmp_path / "two.html")
    assert "/a (1)" in (tmp_path / "two.html").read_text()
    refuses("x.html: cannot write", program_of, monkeypatch, tmp_path / "a", "--to", tmp_path / "none/x.html")
    for wrong in (
        ["--follow"],
        ["--tensorboard", "x", "--serve"],
        ["--serve", "70000"],
    ):
        with pytest.raises((SystemExit, InputError)):
            program_of(monkeypatch, tmp_path / "a", *wrong)


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("plotly", [], "a page needs plotly, which is not installed: pip install plotly"),
        ("msgspec", [], "llamac report needs msgspec, which is not installed: pip install msgspec"),
        ("plotly", ["--serve", "0"], "a page needs plotly, which is not installed"),
        (
            "tensorboard",
            ["--tensorboard", "x"],
            "--tensorboard needs tensorboard, which is not installed: pip install tensorboard",
        ),
    ],
)
def test_missing_libraries(tmp_path, monkeypatch, module, arguments, expected):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert expected in refused(program_of, monkeypatch, write(tmp_path, a_run()), *arguments)


def test_no_text_installs_a_package_of_our_name():
    """PyPI has no llamac: anybody could take the name."""
    folders = [ROOT / name for name in ("llamac", "csrc", "dev", "docs")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    wrong = re.compile(rb"llamac\[|pip install '?llamac")
    assert not [path for path in [ROOT / "README.md", *files] if wrong.search(path.read_bytes())]


# Serving


def test_serve(tmp_path, library):
    log = read(write(tmp_path, a_run()))
    server = serve.server({"a": log}, 0)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path, **headers):
        return urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=10)

    def status(path, **headers) -> int:
        with pytest.raises(urllib.error.HTTPError) as error:
            get(path, **headers)
        return error.value.code

    try:
        text = get("/").read().decode()
        assert '<script src="plotly.min.js">' in text and "connect-src" in text
        answer = get("/data.json")
        assert json.load(answer)["runs"][0]["axis"]["step"][-1] == 50
        assert status("/data.json", **{"If-None-Match": answer.headers["ETag"]}) == 304
        assert status("/../etc/passwd") == 404 and status("/", Host="evil.example") == 403
        with open(tmp_path / "log.jsonl", "a") as file:
            file.write(json.dumps(step_event(51)) + "\n")
        newer = get("/data.json", **{"If-None-Match": answer.headers["ETag"]})
        assert json.load(newer)["runs"][0]["axis"]["step"][-1] == 51
        (tmp_path / "log.jsonl").unlink()
        assert "cannot open" in json.load(get("/data.json"))["problem"]
        assert "cannot bind" in refused(serve.server, {"a": RunLog(log.path)}, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


# Exporting


def test_metrics(tmp_path):
    log = read(write(tmp_path, a_run()))
    found = {row.step: row for row in metrics.rows(log)}
    assert list(found) == list(range(51))
    assert found[0].numbers == {"validation_metrics/loss": 8.3}
    last = found[50]
    assert last.numbers["loss_metrics/global_avg_loss"] == 2 + 6 / 50 and last.texts == {"sample": "Once"}
    assert last.numbers["throughput(tps)"] == 8192 and last.numbers["tflops"] == 0.1
    assert last.numbers["n_tokens_seen"] == 25 * (2048 + 4096) and "mfu(%)" not in last.numbers
    assert last.numbers["evaluation/piqa/accuracy_norm"] == 0.6
    assert last.numbers["time_metrics/end_to_end(s)"] == 0.25
    assert last.seconds - found[0].seconds == pytest.approx(12.5, abs=0.3)
    assert [row.step for row in metrics.rows(log, after=48)] == [49, 50]


def test_rates_are_per_device(tmp_path):
    """Of the ranks in the log, which a resumed run may have others of."""
    events = [run_event(ranks=2), step_event(2), run_event(ranks=4), step_event(3)]
    old = run_event()
    del old["ranks"]  # as older logs are
    log = read(write(tmp_path, [old, step_event(1), *events]))
    assert [row.numbers["throughput(tps)"] for row in metrics.rows(log)] == [8192, 4096, 2048]
    assert [row.numbers["tflops"] for row in metrics.rows(log, after=1)] == [0.05, 0.025]


@pytest.mark.program
def test_ranks_of_a_run_on_several_devices(build, train, data, tmp_path):
    """The program's own log has what a rate per device needs, and readings of each rank."""
    needs(build, "GLOO")
    train(*flags(data, tmp_path / "out", devices=2, steps=2, batch_size=1))
    log = read(tmp_path / "out")
    assert log.of_run("ranks").tolist() == [2, 2]
    rate = next(metrics.rows(log, after=1)).numbers["throughput(tps)"]
    assert rate == pytest.approx(log.columns["tokens_per_s"][1] / 2)
    found = content.report({"a": log})["runs"][0]["ranks"]
    assert found["steps"] == [1, 2] and [len(values) for values in found["readings"]["rss_gib"]] == [2, 2]


def test_tensorboard(tmp_path, monkeypatch, capsys):
    """Read back by TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = write(tmp_path / "a", [*a_run(), step_event(51, loss=None)])
    program_of(monkeypatch, out, "--tensorboard", tmp_path / "tb")
    assert capsys.readouterr().out == "a: exported up to step 51\n"
    found = EventAccumulator(str(tmp_path / "tb/a"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    losses = found.Scalars("loss_metrics/global_avg_loss")
    assert [s.step for s in losses] == list(range(1, 51))
    assert losses[24].value == pytest.approx(2 + 6 / 25) and losses[0].wall_time == pytest.approx(
        1795424400.25, abs=1
    )
    assert [s.value for s in found.Scalars("validation_metrics/loss")] == pytest.approx([8.3, 2.5])
    assert found.Tensors("sample")[0].tensor_proto.string_val == [b"Once"]
    assert b"lr: 0.001" in found.Tensors("configuration")[0].tensor_proto.string_val[0]


def test_following_a_live_run(tmp_path, monkeypatch):
    """The last step waits until its validation is written; Ctrl-C writes the rest."""
    out = write(tmp_path / "a", a_run()[:30])
    pytest.importorskip("tensorboard")
    steps: list[int] = []
    row = export.TensorBoard.row
    monkeypatch.setattr(export.TensorBoard, "row", lambda to, of: (steps.append(of.step), row(to, of)))
    sleeps = iter([*range(3)])

    def sleep(seconds: float) -> None:
        if next(sleeps) == 2:
            raise KeyboardInterrupt
        write(out, a_run()[:40])

    monkeypatch.setattr("time.sleep", sleep)
    program_of(monkeypatch, out, "--tensorboard", tmp_path / "tb", "--follow")
    assert steps == [0, *range(read(out).columns["step"].astype(int)[-1] + 1)]
