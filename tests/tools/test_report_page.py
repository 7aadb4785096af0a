"""The page of llamac report in a browser: it draws, says nothing on the console, needs no network,
and fits narrow windows. Headless chromium opens it from file://."""

import json
import re
import shutil
import subprocess
import threading
from urllib.parse import unquote

import pytest
from report_logs import HOSTILE, a_run, run_event, start_event, step_event, write

from llamac.report import content, page, serve
from llamac.report.log import read
from llamac.report.serve import Live

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="it is not installed: apt-get install chromium")

# What a reader does: presses buttons, zooms into one chart. What is then on the page goes into an attribute.
CLICKS = """<script>
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
async function use() {
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
  document.documentElement.dataset.seen = encodeURIComponent(JSON.stringify(seen));
}
use().catch((error) => { document.documentElement.dataset.error = String(error); });
</script></body>"""


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
    runs = {"a": read(write(folder / "a", a_run())), HOSTILE: read(write(folder / "b", hostile))}
    path = folder / "report.html"
    path.write_text(page.render(content.report(runs)), encoding="utf-8")
    return path


def test_in_a_browser(two_runs, tmp_path):
    text = two_runs.read_text(encoding="utf-8")
    path = tmp_path / "clicked.html"
    path.write_text(CLICKS.join(text.rsplit("</body>", 1)), encoding="utf-8")
    done = in_browser(path.as_uri(), tmp_path / "profile", "--window-size=700,900", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "data-error" not in done.stdout.split("<head>")[0]
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    seen = json.loads(unquote(found[1]))
    assert seen["charts"] == ["loss", "lr", "grad_norm", "speed", "mfu", "memory", "use", "power",
                              "temperature", "evaluations"]  # fmt: skip
    assert seen["overflow"] <= 0 and seen["dark"] == "light"
    assert seen["zoomed"] == [20480, 40960] and seen["reset"] != seen["zoomed"]
    assert (seen["axis"], seen["scale"], seen["background"]) == ("tokens", "log", "rgb(13, 17, 23)")
    assert seen["texts"] == ["Once", HOSTILE] and seen["scripts"] == text.count("<script") + 1
    assert 0 < seen["rows"] < seen["all"] and seen["print"] == "#ffffff"


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


def test_following_a_run(tmp_path):
    """The page draws what a run writes after it was loaded."""
    pytest.importorskip("plotly")
    log = read(write(tmp_path, a_run()))
    server = serve.server({"a": log}, 0)
    asked = server.RequestHandlerClass.live

    def update() -> tuple[int, dict]:
        """As the server's, with a step more each time."""
        with open(tmp_path / "log.jsonl", "a") as file:
            file.write(json.dumps(step_event(int(log.columns["step"][-1]) + 1)) + "\n")
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
    assert last >= 53 and f"<b>{last} of 600</b>" in done.stdout
