// The page: state, drawing, controls, the theme, printing, and the questions to a server for newer data.

let report = JSON.parse(document.getElementById("data").textContent);
const charts = new Map();  // element by id
const state = {
  axis: "step",
  log: false,
  raw: true,
  smoothing: 3,        // percent of the run
  hidden: new Set(),   // labels of runs
  sort: {name: "", down: false},  // the table of runs by this figure
  theme: "auto",
  range: null,
  now: null,  // Unix time of the server
  onlyDifferences: report.runs.length > 1
};
const byId = (id) => document.getElementById(id);
const darkByDefault = matchMedia("(prefers-color-scheme: dark)");

function colors(forPrint) {
  state.dark = !forPrint && (state.theme === "auto" ? darkByDefault.matches : state.theme === "dark");
  document.documentElement.dataset.theme = state.dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement),
        get = (name) => style.getPropertyValue(name).trim();
  Object.assign(
      state, {text: get("--text"), muted: get("--muted"), grid: get("--line"), card: get("--card")});
}

function timeUnit() {
  const most = Math.max(...report.runs.map((run) => run.axis.hours.at(-1) || 0));
  [state.timeUnit, state.perHour] = most > 3 ? ["hours", 1] :
      most > 0.05                            ? ["minutes", 60] :
                                               ["seconds", 3600];
}

// A chart in a card of its own, which is made the first time; null removes it.
function place(parent, id, title, unit, wide, found) {
  let element = charts.get(id);
  if (!found) {
    if (element) {
      Plotly.purge(element);
      element.parentElement.remove();
      charts.delete(id);
    }
    return;
  }
  if (!element) {
    element = node("div", {class: "chart", id: `chart-${id}`});
    const made = card(title, unit, element);
    if (wide) made.classList.add("wide");
    parent.append(made);
    charts.set(id, element);
  }
  if (found.height) element.style.height = `${found.height}px`;
  Plotly.react(element, found.traces, found.layout, CONFIG);
  if (!element.linked) {
    element.on("plotly_relayout", (change) => zoomed(element, change));
    element.linked = true;
  }
}

// All charts over steps have the same horizontal range.
let zooming = false;
function zoomed(element, change) {
  if (zooming || element.dataset.alone) return;
  const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] :
                                             change["xaxis.range"] || null;
  if (!range && !change["xaxis.autorange"]) return;
  zoom(range, element);
}

function zoom(range, except) {
  state.range = range;
  zooming = true;
  const others = [...charts.values()].filter((element) => element !== except && !element.dataset.alone);
  const change = range ? {"xaxis.range": range} :
                         {"xaxis.autorange": true, ...(except ? {} : {"yaxis.autorange": true})};
  Promise.all(others.map((element) => Plotly.relayout(element, {...change}))).then(() => {
    zooming = false;
  });
}

function drawCharts() {
  const grid = byId("charts"), has = (key) => report.runs.some((run) => run.curves[key]);
  for (const chart of chartsOf(report))
    place(
        grid, chart.id, chart.title, chart.unit, chart.wide,
        chart.unless && has(chart.unless) ? null : timeChart(chart, report, state));
  report.runs.forEach((run, r) => {
    for (const [key, title, unit] of RANK_CHARTS) {
      const values = run.ranks?.readings[key];
      place(
          grid, `ranks-${r}-${key.replace(".", "-")}`, `${title} of each rank`,
          report.runs.length > 1 ? `${unit}, ${run.label}` : unit, false,
          values && !state.hidden.has(run.label) ? rankChart(run, values, unit, state) : null);
    }
  });
}

function drawProfiles() {
  report.runs.forEach((run, k) => {
    const several = report.runs.length > 1 ? `${run.label}: ` : "";
    const profile = run.profile, parent = byId("profiles"), ids = [`shares-${k}`, `profile-${k}`];
    place(
        parent, ids[0], `${several}Where a step's time goes`, profile ? profile.title : "", false,
        profile && shareChart(profile, report, state));
    place(
        parent, ids[1], `${several}Operations`,
        profile && profile.others ? `the ${profile.rows.length} largest; ${profile.others} more` :
                                    "time, share of the step, % of the limit",
        false, profile && profileChart(profile, report, state));
    for (const id of ids) {
      const element = charts.get(id);
      if (!element || element.dataset.alone) continue;
      element.dataset.alone = "yes";
      if (id === ids[1])
        element.parentElement.append(
            node("ol", {class: "advice"}, ...profile.advice.map((text) => node("li", {}, text))));
    }
  });
}

function drawTables() {
  const put = (id, found) => byId(id).replaceChildren(...(found ? [found] : []));
  byId("runs").replaceChildren(...report.runs.map((run, k) => runName(run, k, report, state)));
  put("summary", summaryOf(report, state));
  put("evaluations", evaluationsOf(report));
  put("samples", samplesOf(report));
  put("events", eventsOf(report));
  put("configuration", configurationOf(report, state.onlyDifferences));
  const box = byId("differences");
  if (box)
    box.addEventListener("change", () => {
      state.onlyDifferences = box.checked;
      drawTables();
    });
  drawLive();
  byId("missing").textContent = missingOf(report);
  byId("problem").textContent = report.problem || "";
  byId("problem").hidden = !report.problem;
  const live = report.follow ? `, asks for newer data every ${report.follow} s` : "";
  byId("footer").textContent = `llamac ${report.version}, ${report.generated}${
      live}. Charts by plotly.js (MIT). Drag to zoom, double-click to reset.`;
}

function drawLive() {
  const lines = state.now ? report.runs.map((run) => liveOf(run, state.now, report.runs.length > 1)) : [];
  byId("live").replaceChildren(...lines);
}

// Of the table of runs.
function sortBy(name) {
  state.sort = {name, down: state.sort.name === name && !state.sort.down};
  drawTables();
}

function toggleRun(label) {
  if (!state.hidden.delete(label)) state.hidden.add(label);
  drawCharts();
}

function draw() {
  drawCharts();
  drawProfiles();
  drawTables();
}

// Controls

function pressed(group, value) {
  for (const button of byId(group).querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.value === value));
}

function setTheme(theme) {
  state.theme = theme;
  try {
    localStorage.setItem("llamac-theme", theme);
  } catch { /* a page without storage forgets it */
  }
  pressed("theme", theme);
  colors();
  draw();
}

function setAxis(axis) {
  state.axis = axis;
  state.range = null;
  pressed("axis", axis);
  drawCharts();
}

function toggle(id, key) {
  byId(id).addEventListener("click", () => {
    state[key] = !state[key];
    byId(id).setAttribute("aria-pressed", String(state[key]));
    drawCharts();
  });
}

function controls() {
  byId("controls").hidden = false;
  for (const button of byId("axis").querySelectorAll("button")) {
    button.disabled =
        button.dataset.value !== "step" && report.runs.some((run) => !run.axis[button.dataset.value].length);
    button.addEventListener("click", () => setAxis(button.dataset.value));
  }
  for (const button of byId("theme").querySelectorAll("button"))
    button.addEventListener("click", () => setTheme(button.dataset.value));
  toggle("log", "log");
  toggle("raw", "raw");
  byId("smoothing").addEventListener("input", () => {
    state.smoothing = Number(byId("smoothing").value);
    byId("percent").textContent = `${state.smoothing}%`;
    drawCharts();
  });
  byId("csv").addEventListener("click", () => saveCsv("curves.csv", curveRows(report)));
  byId("reset").addEventListener("click", () => zoom(null));
  darkByDefault.addEventListener("change", () => setTheme(state.theme));
}

// On paper the charts are light, and as wide as the page.
function printing(begins) {
  colors(begins);
  draw();
  for (const element of charts.values())
    Plotly.relayout(element, begins ? {width: 680, autosize: false} : {width: null, autosize: true});
}

// What the server last sent; a server that has ended is a problem until it answers again.
let lastAnswer = "";
async function follow() {
  const {follow: seconds, colors: palette} = report;
  try {
    const reply = await fetch("data.json", {cache: "no-cache"}), answer = await reply.text();
    state.now = Date.parse(reply.headers.get("Date")) / 1000;
    if (answer !== lastAnswer) {
      report = Object.assign(JSON.parse(answer), {follow: seconds, colors: palette});
      timeUnit();
      draw();
      lastAnswer = answer;
    }
    drawLive();
  } catch {
    lastAnswer = "";
    report.problem = "The server does not answer; this is the last that it sent.";
    drawTables();
  }
  setTimeout(follow, 1000 * seconds);
}

try {
  state.theme = localStorage.getItem("llamac-theme") || "auto";
} catch { /* no storage */
}
colors();
timeUnit();
controls();
pressed("theme", state.theme);
pressed("axis", state.axis);
draw();
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));
if (report.follow) follow();
document.documentElement.dataset.drawn = "yes";
