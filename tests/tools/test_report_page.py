"""The page of llamac report in a browser: it draws, says nothing on the console, needs no network,
and fits narrow windows. Headless chromium opens it from file://."""

import csv
import io
import json
import re
import shutil
import subprocess
import threading
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from report_logs import HOSTILE, a_run, run_event, start_event, step_event, write

from llamac.report import content, page, serve
from llamac.report.log import read
from llamac.report.serve import Live

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="it is not installed: apt-get install chromium")

# What a reader does: presses buttons, zooms into one chart. What is then on the page goes into an attribute.
SCRIPT = """<script>
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
@USE@
use().then((seen) => { document.documentElement.dataset.seen = encodeURIComponent(JSON.stringify(seen)); })
  .catch((error) => { document.documentElement.dataset.error = String(error); });
</script></body>"""
CLICKS = """async function use() {
  await wait(500);
  const seen = { title: document.title, dark: document.documentElement.dataset.theme };
  const drawn = [...document.querySelectorAll(".chart")].filter((chart) => chart.querySelector("svg"));
  seen.charts = drawn.map((chart) => chart.id.slice(6));
  seen.overflow = document.documentElement.scrollWidth - innerWidth;
  document.querySelector("#axis [data-value=tokens]").click();
  document.getElementById("log").click();
  document.querySelector("#theme [data-value=dark]").click();
  await wait(500);
  await Plotly.relayout(byId("chart-loss"), { "xaxis.range[0]": 20480, "xaxis.range[1]": 40960 });
  await wait(500);
  seen.zoomed = byId("chart-lr").layout.xaxis.range;
  byId("reset").click();
  await wait(500);
  seen.reset = byId("chart-lr").layout.xaxis.range;
  seen.axis = byId("chart-loss").layout.xaxis.title.text;
  seen.scale = byId("chart-loss").layout.yaxis.type;
  seen.background = getComputedStyle(document.body).backgroundColor;
  seen.scripts = document.scripts.length;
  seen.texts = [...document.querySelectorAll("pre")].map((e) => e.textContent);
  const box = byId("differences");
  if (box) { seen.rows = byId("configuration").querySelectorAll("tbody tr").length; box.click();
    seen.all = byId("configuration").querySelectorAll("tbody tr").length; }
  dispatchEvent(new Event("beforeprint"));
  await wait(500);
  seen.print = byId("chart-loss").layout.paper_bgcolor;
  return seen;
}"""
# Of ten runs, in a window as wide as a telephone's.
TEN_RUNS = """async function use() {
  await wait(500);
  const all = (selector) => [...document.querySelectorAll(selector)], box = (e) => e.getBoundingClientRect();
  const chart = (id) => byId(`chart-${id}`), seen = {};
  const shown = () => chart("loss").data.filter((trace) => trace.showlegend);
  seen.looks = new Set(shown().map(({line}) => line.color + line.dash)).size;
  seen.names = new Set(all("#runs .run").map((e) => e.className + e.style.cssText)).size;
  seen.widths = chart("lr").data.map(({line}) => line.width);
  document.documentElement.style.width = "390px";
  dispatchEvent(new Event("resize"));
  await wait(500);
  seen.width = chart("loss").clientWidth;
  seen.covered = all(".chart").filter((e) => {
    const legend = e.querySelector(".legend"), tools = box(e.querySelector(".modebar"));
    return legend && box(legend).top < tools.bottom && box(legend).right > tools.left;
  }).map((e) => e.id);
  await Plotly.relayout(chart("grad_norm"), {"yaxis.range": [Math.log10(5.2), Math.log10(9.4)]});
  seen.ticks = [...chart("grad_norm").querySelectorAll(".ytick text")].map((e) => Number(e.textContent));
  const names = () => all("#run-table tbody tr").map((e) => e.cells[0].textContent.trim());
  const sort = () => all("#run-table th button").find((e) => /training loss/.test(e.textContent)).click();
  sort();
  seen.ascending = names();
  sort();
  seen.descending = names();
  document.querySelector("#run-table input").click();
  await wait(200);
  seen.shown = shown().length;
  const roughness = () => { const y = shown()[0].y; return Math.max(...y) - Math.min(...y); };
  const before = roughness();
  byId("smoothing").value = "20";
  byId("smoothing").dispatchEvent(new Event("input"));
  await wait(500);
  seen.smoother = roughness() < before && byId("percent").textContent === "20%";
  const blobs = [];
  URL.createObjectURL = (blob) => { blobs.push(blob); return "#"; };
  byId("csv").click();
  document.querySelector("#run-table button.plain").click();
  seen.csv = await Promise.all(blobs.map((blob) => blob.text()));
  return seen;
}"""


def in_browser(address: str, profile, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--hide-scrollbars", "--virtual-time-budget=20000", "--enable-logging=stderr", *arguments,
         address],
        capture_output=True, text=True, timeout=120, check=True)  # fmt: skip


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("page")
    device = {"watts": 650.5, "celsius": 61.0}
    hostile = [run_event(device=HOSTILE), start_event(model=HOSTILE, **{HOSTILE: HOSTILE}),
               *(step_event(k, mfu=0.4, gpu_mem_gib=58.0, gpu_percent=9.0,
                             device=device) for k in range(1, 41)),
               {"event": "sample", "step": 40, "text": HOSTILE}]  # fmt: skip
    clocks = [{"host": HOSTILE, "device": {"clock_mhz": mhz}} for mhz in (1700, 1200)]
    ranks = [{"event": "ranks", "step": k, "ranks": clocks} for k in (10, 50)]
    runs = {"a": read(write(folder / "a", [*a_run(), *ranks])), HOSTILE: read(write(folder / "b", hostile))}
    path = folder / "report.html"
    path.write_text(page.render(content.report(runs)), encoding="utf-8")
    return path


def seen_on(text: str, use: str, folder) -> dict:
    """What the script sees on the page."""
    path = folder / "used.html"
    path.write_text(SCRIPT.replace("@USE@", use).join(text.rsplit("</body>", 1)), encoding="utf-8")
    done = in_browser(path.as_uri(), folder / "profile", "--window-size=700,900", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found and "data-error" not in done.stdout.split("<head>")[0], done.stdout[:1000]
    return json.loads(unquote(found[1]))


def test_in_a_browser(two_runs, tmp_path):
    text = two_runs.read_text(encoding="utf-8")
    seen = seen_on(text, CLICKS, tmp_path)
    assert seen["charts"] == ["loss", "difference", "lr", "grad_norm", "speed", "mfu", "memory-0", "memory-1",
                              "memory-2", "use-0", "use-1", "power", "temperature", "evaluations",
                              "ranks-0-device-clock_mhz"]  # fmt: skip
    assert seen["overflow"] <= 0 and seen["dark"] == "light"
    assert seen["zoomed"] == [20480, 40960] and seen["reset"] != seen["zoomed"]
    assert (seen["axis"], seen["scale"], seen["background"]) == ("tokens", "log", "rgb(13, 17, 23)")
    assert seen["texts"] == ["Once", HOSTILE] and seen["scripts"] == text.count("<script") + 1
    assert 0 < seen["rows"] < seen["all"] and seen["print"] == "#ffffff"


@pytest.mark.more
def test_ten_runs_on_a_telephone(tmp_path):
    """Each has a look of its own, also where curves coincide; nothing covers a legend; an axis of less than a
    decade has numbers; the table sorts and hides runs; a slider smooths; CSV."""
    pytest.importorskip("plotly")
    logs = {}
    for k in range(10):
        steps = [step_event(n, loss=9 - k / 2 + n % 2, grad_norm=5.0 + n % 5) for n in range(1, 41)]
        logs[f'{k}"'] = read(write(tmp_path / str(k), [run_event(), start_event(), *steps]))
    seen = seen_on(page.render(content.report(logs)), TEN_RUNS, tmp_path)
    assert seen["looks"] == seen["names"] == 10 and seen["width"] < 390 and seen["covered"] == []
    assert seen["widths"] == sorted(seen["widths"], reverse=True) and seen["widths"][5] > seen["widths"][9]
    assert len([tick for tick in seen["ticks"] if 5 < tick < 10]) >= 3
    assert seen["descending"] == list(logs) and seen["ascending"] == list(reversed(logs))
    assert seen["shown"] == 9 and seen["smoother"]
    curves, table = (list(csv.reader(io.StringIO(text))) for text in seen["csv"])
    assert curves[:2] == [["run", "curve", "step", "value"], ['0"', "loss", "1", "10"]]
    assert [row[0] for row in table[1:]] == list(logs) and table[1][table[0].index("parameters")] == "1200"


@pytest.mark.slow
def test_pictures(two_runs, tmp_path):
    """Light and dark by the system's preference; what is drawn is not one color."""
    sizes = []
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        done = in_browser(two_runs.as_uri(), tmp_path / "profile", "--window-size=1400,2400",
                          f"--blink-settings=preferredColorScheme={scheme}",
                          f"--screenshot={picture}")  # fmt: skip
        assert "CONSOLE" not in done.stderr, done.stderr
        sizes.append(picture.read_bytes())
    assert sizes[0] != sizes[1] and min(map(len, sizes)) > 50_000


@pytest.mark.more
def test_following_runs(tmp_path):
    """The page draws what a run writes after it was loaded, and says which one is stalled."""
    pytest.importorskip("plotly")
    log, old = (read(write(tmp_path / name, a_run())) for name in "ab")
    with open(tmp_path / "b/log.jsonl", "a") as file:
        file.write(json.dumps(step_event(51, time="2020-01-01T00:00:00.000Z")) + "\n")
    server = serve.server({"a": log, "b": old}, 0)
    asked = server.RequestHandlerClass.live

    def update() -> tuple[int, dict]:
        """As the server's, with a step more each time."""
        now = datetime.now(UTC).isoformat()
        with open(tmp_path / "a/log.jsonl", "a") as file:
            file.write(json.dumps(step_event(int(log.columns["step"][-1]) + 1, time=now)) + "\n")
        return Live.update(asked)

    asked.update = update
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        done = in_browser(address, tmp_path / "profile", "--dump-dom")
    finally:
        server.shutdown()
        server.server_close()
    assert "CONSOLE" not in done.stderr, done.stderr
    last = int(log.columns["step"][-1])
    assert last >= 53 and f">{last} of 600</td>" in done.stdout
    live = re.search(r'<div id="live".*?</div></div>', done.stdout)[0]
    assert re.search(r"a: 2:1\d left · last update \d s ago", live), live
    assert re.search(r"b: <span[^>]*>stalled</span> no event for \d+:.*; a step takes 0.25 s", live), live
