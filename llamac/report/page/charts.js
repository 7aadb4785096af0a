"use strict";
// The charts, drawn by plotly.js: which curves they have, and how they look. No text of a run reaches HTML
// unescaped: plotly reads a little markup in names and labels.

const DASHES = ["solid", "dot", "dash", "dashdot"];
const MARKS = { spike: "triangle-up", skipped: "x", checkpoint: "diamond-tall" };

// Charts in order: curves with their labels (the first chart that has data of `instead` is left out).
const CHARTS = [
  { id: "loss", title: "Loss", unit: "nats per token", wide: true, curves: [["loss", "training"]], events: true },
  { id: "lr", title: "Learning rate", unit: "", curves: [["lr", "learning rate"]], format: ".3~e" },
  { id: "grad_norm", title: "Gradient norm", unit: "before clipping", curves: [["grad_norm", "gradient norm"]], log: true },
  { id: "speed", title: "Speed", unit: "tokens per second", curves: [["tokens_per_s", "tokens/s"]], zero: true },
  { id: "mfu", title: "MFU", unit: "% of the device's peak", curves: [["mfu", "MFU"]], zero: true },
  { id: "tflops", title: "Compute", unit: "TFLOP/s", curves: [["tflops", "TFLOP/s"]], zero: true, unless: "mfu" },
  { id: "memory", title: "Memory", unit: "GiB", zero: true,
    curves: [["gpu_mem_gib", "GPU"], ["rss_gib", "process, peak"], ["system_mem_gib", "machine"]] },
  { id: "use", title: "Use", unit: "%; of the CPU, 100 is one core", zero: true,
    curves: [["gpu_percent", "GPU"], ["cpu_percent", "CPU"]] },
  { id: "power", title: "Power", unit: "W", curves: [["watts", "power"]], zero: true },
  { id: "temperature", title: "Temperature", unit: "°C", curves: [["celsius", "temperature"]] },
];

const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A color as dark pages need it: nearer to white.
function shade(color, dark) {
  if (!dark) return color;
  const parts = [1, 3, 5].map((k) => parseInt(color.slice(k, k + 2), 16));
  return "#" + parts.map((p) => Math.round(p + (255 - p) * 0.25).toString(16).padStart(2, "0")).join("");
}

// The x of steps: steps, or tokens and hours by linear interpolation in the run's axis.
function xOf(run, steps, state) {
  if (state.axis === "step") return steps;
  const known = run.axis.step, values = run.axis[state.axis];
  const scale = state.axis === "hours" ? state.perHour : 1;
  return steps.map((step) => {
    let low = 0, high = known.length - 1;
    if (high < 0) return null;
    if (step <= known[0]) return (values[0] * scale * step) / (known[0] || 1);
    if (step >= known[high]) return values[high] * scale;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (known[middle] <= step) low = middle; else high = middle;
    }
    const part = (step - known[low]) / (known[high] - known[low]);
    return (values[low] + part * (values[high] - values[low])) * scale;
  });
}

// The value of a curve at a step: of the nearest point before it.
function valueAt([steps, values], step) {
  let found = null;
  for (let k = 0; k < steps.length && steps[k] <= step; k++) if (values[k] !== null) found = values[k];
  return found === null ? values[0] : found;
}

function line(run, steps, values, name, color, state, more) {
  return Object.assign({ type: "scatter", mode: "lines", x: xOf(run, steps, state), y: values, name: plain(name),
    line: { color, width: 1.8 }, hovertemplate: `%{y:.5~g}<extra>${plain(name)}</extra>` }, more);
}

function curveTraces(chart, report, state) {
  const traces = [], several = report.runs.length > 1;
  const present = chart.curves.filter(([key]) => report.runs.some((run) => run.curves[key]));
  report.runs.forEach((run, r) => {
    present.forEach(([key, label], c) => {
      const curve = run.curves[key];
      if (!curve) return;
      const color = shade(report.colors[(several ? r : c) % report.colors.length], state.dark);
      const dash = DASHES[(several ? c : 0) % DASHES.length];
      const name = several ? (present.length > 1 ? `${run.label}: ${label}` : run.label) : label;
      const smooth = curve.smooth;
      if (!smooth || state.raw)
        traces.push(line(run, curve.raw[0], curve.raw[1], smooth ? `${name}, raw` : name, color, state, {
          opacity: smooth ? 0.35 : 1, showlegend: !smooth, legendgroup: `${r}-${c}`,
          line: { color, width: smooth ? 1 : 1.8, dash } }));
      if (smooth)
        traces.push(line(run, smooth[0], smooth[1], name, color, state, {
          legendgroup: `${r}-${c}`, line: { color, width: 2.2, dash } }));
    });
  });
  return traces;
}

function validationTraces(report, state) {
  const several = report.runs.length > 1;
  return report.runs.flatMap((run, r) => {
    if (!run.validation[0].length) return [];
    const color = shade(report.colors[several ? r : 1], state.dark);
    const name = several ? `${run.label}: validation` : "validation";
    return [line(run, run.validation[0], run.validation[1], name, color, state, {
      mode: "lines+markers", line: { color, width: 1.5, dash: several ? "dot" : "solid" }, marker: { size: 6 } })];
  });
}

// Spikes, skipped steps and checkpoints on the curve of a chart.
function eventTraces(report, state, key) {
  const traces = [];
  report.runs.forEach((run, r) => {
    const curve = run.curves[key];
    if (!curve) return;
    for (const [kind, symbol] of Object.entries(MARKS)) {
      const found = run.events.filter((e) => e[2] === kind && (kind !== "spike" || e[3].startsWith(key)));
      if (!found.length || (key !== "loss" && kind === "checkpoint")) continue;
      const several = report.runs.length > 1;
      traces.push({ type: "scatter", mode: "markers", name: plain(several ? `${run.label}: ${kind}` : kind),
        x: xOf(run, found.map((e) => e[0]), state),
        y: found.map((e) => valueAt(kind === "spike" ? curve.raw : curve.smooth || curve.raw, e[0])),
        marker: { symbol, size: kind === "checkpoint" ? 9 : 10, line: { width: 1, color: state.card },
          color: kind === "checkpoint" ? shade(report.colors[several ? r : 2], state.dark) : state.dark ? "#f87171" : "#b91c1c" },
        text: found.map((e) => plain(`step ${e[0]}: ${e[3]}`.slice(0, 120))), hovertemplate: `%{text}<extra>${plain(kind)}</extra>` });
    }
  });
  return traces;
}

// A dotted line where a run was resumed.
function resumeLines(report, state) {
  return report.runs.flatMap((run) => {
    const found = run.events.filter((e) => e[2] === "resume" && e[0] > 0);
    return xOf(run, found.map((e) => e[0]), state).map((x) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x,
      y0: 0, y1: 1, line: { color: state.muted, width: 1, dash: "dot" } }));
  });
}

function layoutOf(state, more) {
  const axis = { gridcolor: state.grid, zeroline: false, linecolor: state.muted, automargin: true };
  const base = { autosize: true, paper_bgcolor: state.card, plot_bgcolor: state.card, colorway: state.colors,
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: state.text },
    margin: { l: 52, r: 14, t: 30, b: 40 }, hovermode: "x unified",
    hoverlabel: { bgcolor: state.card, bordercolor: state.grid, font: { color: state.text, size: 12 } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", traceorder: "normal" },
    xaxis: { ...axis }, yaxis: { ...axis } };
  for (const [key, value] of Object.entries(more))
    base[key] = typeof value === "object" && !Array.isArray(value) ? { ...base[key], ...value } : value;
  return base;
}

const CONFIG = { displaylogo: false, displayModeBar: "hover", responsive: true, showTips: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], toImageButtonOptions: { format: "svg" } };

function timeChart(chart, report, state) {
  const traces = curveTraces(chart, report, state);
  if (!traces.length) return null;
  if (chart.id === "loss") traces.push(...validationTraces(report, state));
  if (chart.events || chart.id === "grad_norm") traces.push(...eventTraces(report, state, chart.curves[0][0]));
  const y = { type: chart.log || (chart.id === "loss" && state.log) ? "log" : "linear" };
  if (y.type === "log") Object.assign(y, { dtick: "D2", exponentformat: "power" });
  if (chart.zero && y.type === "linear") y.rangemode = "tozero";
  if (chart.format) y.tickformat = chart.format;
  const title = { step: "step", tokens: "tokens", hours: `time in optimizer steps (${state.timeUnit})` }[state.axis];
  const visible = traces.filter((t) => t.showlegend !== false).length;
  const layout = layoutOf(state, { showlegend: visible > 1, shapes: resumeLines(report, state), yaxis: y,
    uirevision: state.axis + (chart.id === "loss" ? state.log : ""), xaxis: { title: { text: title }, hoverformat: state.axis === "hours" ? ".4~g" : ",.6~s",
      range: state.range || undefined, autorange: !state.range } });
  if (state.axis === "step") layout.xaxis.hoverformat = ",d";
  return { traces, layout };
}

function saturatedChart(report, state) {
  const traces = report.runs.flatMap((run, r) => run.saturated[0].length ? [line(run, run.saturated[0], run.saturated[1],
    run.label, shade(report.colors[r % report.colors.length], state.dark), state, { mode: "markers", marker: { size: 4 } })] : []);
  if (!traces.length) return null;
  return { traces, layout: layoutOf(state, { showlegend: report.runs.length > 1, yaxis: { type: "log" }, xaxis: { title: { text: "step" } } }) };
}

function evaluationChart(report, state) {
  const several = report.runs.length > 1;
  const tasks = [...new Set(report.runs.flatMap((run) => Object.keys(run.evaluations)))];
  const traces = report.runs.flatMap((run, r) => tasks.filter((task) => run.evaluations[task]).map((task) => {
    const rows = run.evaluations[task], k = tasks.indexOf(task);
    const color = shade(report.colors[(several ? r : k) % report.colors.length], state.dark);
    return line(run, rows.map((row) => row[0]), rows.map((row) => 100 * row[1]), several ? `${run.label}: ${task}` : task,
      color, state, { mode: "lines+markers", marker: { size: 7 }, line: { color, dash: DASHES[(several ? k : 0) % 4] } });
  }));
  if (!traces.length) return null;
  return { traces, layout: layoutOf(state, { showlegend: traces.length > 1, yaxis: { rangemode: "tozero" }, xaxis: { title: { text: { step: "step", tokens: "tokens", hours: `time (${state.timeUnit})` }[state.axis] } } }) };
}

// Each operation: the least that its limit allows, and the rest of its time.
function profileChart(profile, report, state) {
  const rows = [...profile.rows].reverse(), names = rows.map((row) => plain(row.name));
  const least = rows.map((row) => Math.min(row.limit_ms || 0, row.ms));
  const label = (row) => `${row.ms.toPrecision(3)} ms · ${(100 * row.share).toFixed(1)}%` +
    (row.limit_ms ? ` · ${(100 * row.limit_ms / row.ms).toFixed(0)}% of ${row.by}` : "");
  const hover = rows.map((row) => `${plain(row.name)}, ${plain(row.category)}<br>${label(row)}<br>${row.calls} calls per step` +
    (row.limit_ms ? `<br>limit: ${row.limit_ms.toPrecision(3)} ms by ${plain(row.by)}` : "<br>no known limit"));
  const bar = (name, x, color, more) => Object.assign({ type: "bar", orientation: "h", name, y: names, x, marker: { color },
    customdata: hover, hovertemplate: "%{customdata}<extra></extra>" }, more);
  const most = Math.max(...rows.map((row) => row.ms), 1e-9);
  return { height: 24 * rows.length + 90, traces: [
    bar("least time that the limit allows", least, shade(report.colors[0], state.dark)),
    bar("above the limit", rows.map((row, k) => row.ms - least[k]), state.dark ? "#4b5563" : "#c3cad5",
      { text: rows.map(label), textposition: "outside", cliponaxis: false, textfont: { size: 11, color: state.text } })],
    layout: layoutOf(state, { barmode: "stack", bargap: 0.25, hovermode: "closest", showlegend: true,
      xaxis: { title: { text: "ms per step" }, range: [0, 1.6 * most] }, yaxis: { ticksuffix: " ", gridcolor: "rgba(0,0,0,0)", tickfont: { size: 11 } } }) };
}

function shareChart(profile, report, state) {
  const colors = [...report.colors, "#e45756", "#72b7b2", "#eeca3b", "#ff9da6", "#7f7f7f", "#bab0ac"];
  const traces = profile.shares.map(([name, ms, share], k) => ({ type: "bar", orientation: "h", y: ["step"], x: [ms], name: plain(name),
    marker: { color: shade(colors[k % colors.length], state.dark) }, text: share > 0.04 ? `${plain(name)} ${(100 * share).toFixed(0)}%` : "",
    textposition: "inside", insidetextanchor: "middle", textangle: 0,
    hovertemplate: `${plain(name)}: ${ms.toPrecision(4)} ms, ${(100 * share).toFixed(1)}%<extra></extra>` }));
  return { height: 140, traces, layout: layoutOf(state, { barmode: "stack", hovermode: "closest", showlegend: true,
    margin: { l: 8, r: 8, t: 30, b: 4 }, legend: { y: -0.1, x: 0, xanchor: "left", yanchor: "top" },
    xaxis: { visible: false }, yaxis: { visible: false } }) };
}
