"use strict";
// The curves of the charts, as traces of plotly.js. No text of a run reaches plotly unescaped: it reads a
// little markup in names and labels.

const DASHES = ["solid", "dash", "dot"];
const MARKS = {spike: "triangle-up", skipped: "x", checkpoint: "diamond-tall"};

// The charts in order, with their curves: name and label. `unless`: left out where a run has that curve. `together`:
// one chart for all curves also with several runs.
const chart = (id, title, unit, curves, more) => ({id, title, unit, curves, ...more});
const CHARTS = [
  chart(
      "loss", "Loss", "nats per token; points: validation", [["loss", "training"], ["validation", "validation"]],
      {wide: true, together: true}),
  chart(
      "difference", "Loss difference", "nats per token, minus the first run's",
      [["loss_difference", "training"], ["validation_difference", "validation"]], {together: true}),
  chart("lr", "Learning rate", "", [["lr", "learning rate"]], {format: ".3~e"}),
  chart("grad_norm", "Gradient norm", "before clipping", [["grad_norm", "gradient norm"]], {log: true}),
  chart("speed", "Speed", "tokens per second", [["tokens_per_s", "tokens/s"]], {zero: true}),
  chart("mfu", "MFU", "% of the device's peak", [["mfu", "MFU"]], {zero: true}),
  chart("tflops", "Compute", "TFLOP/s", [["tflops", "TFLOP/s"]], {zero: true, unless: "mfu"}),
  chart(
      "memory", "Memory", "GiB",
      [["gpu_mem_gib", "GPU"], ["rss_gib", "process, peak"], ["system_mem_gib", "machine"]], {zero: true}),
  chart(
      "use", "Use", "%; of the CPU, 100 is one core", [["gpu_percent", "GPU"], ["cpu_percent", "CPU"]],
      {zero: true}),
  chart("power", "Power", "W", [["watts", "power"]], {zero: true}),
  chart("temperature", "Temperature", "°C", [["celsius", "temperature"]]),
  chart(
      "saturated", "Saturated values", "largest share of a tensor beyond fp8's range", [["saturated", "share"]],
      {log: true}),
];
const MODES = {saturated: "markers", validation: "lines+markers", evaluation: "lines+markers"};

// Readings of each rank: the name in the log, title, unit.
const RANK_CHARTS = [
  ["device.clock_mhz", "Clock", "MHz"], ["device.celsius", "Temperature", "°C"], ["device.watts", "Power", "W"],
  ["gpu_percent", "GPU use", "%"], ["gpu_mem_gib", "GPU memory", "GiB"], ["cpu_percent", "CPU use", "%"],
  ["rss_gib", "Peak memory", "GiB"]
];

// The charts of a report. With several runs, each has one curve per run.
function chartsOf(report) {
  const tasks = new Set(report.runs.flatMap((run) => Object.keys(run.evaluations)));
  const curves = [...tasks].map((task) => [`evaluation ${task}`, task]);
  const all = [...CHARTS, chart("evaluations", "Evaluations", "accuracy, %", curves, {zero: true})];
  const divided = (each) => each.curves.map(
      ([key, label], k) =>
          ({...each, id: `${each.id}-${k}`, title: `${each.title}: ${label}`, curves: [[key, label]]}));
  const whole = (each) => report.runs.length === 1 || each.together || each.curves.length === 1;
  return all.flatMap((each) => whole(each) ? [each] : divided(each));
}

const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A color as dark pages need it: nearer to white.
function shade(color, dark) {
  if (!dark) return color;
  const parts = [1, 3, 5].map((k) => parseInt(color.slice(k, k + 2), 16));
  return "#" + parts.map((p) => Math.round(p + (255 - p) * 0.25).toString(16).padStart(2, "0")).join("");
}

// The color and dash of the k-th of several.
const look = (k, {colors}, {dark}) =>
    ({color: shade(colors[k % colors.length], dark), dash: DASHES[Math.floor(k / colors.length) % DASHES.length]});

// Steps and the mean of the known values in a window of so many percent of the run.
function smoothed([steps, values], percent) {
  const half = Math.floor(values.length * percent / 200), sums = [0], counts = [0];
  values.forEach((value, k) => {
    sums.push(sums[k] + (value ?? 0));
    counts.push(counts[k] + (value === null ? 0 : 1));
  });
  return [
    steps, values.map((_, k) => {
      const first = Math.max(k - half, 0), end = Math.min(k + half + 1, values.length);
      const count = counts[end] - counts[first];
      return count ? (sums[end] - sums[first]) / count : null;
    })
  ];
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
      if (known[middle] <= step) low = middle;
      else high = middle;
    }
    const part = (step - known[low]) / (known[high] - known[low]);
    return (values[low] + part * (values[high] - values[low])) * scale;
  });
}

// The value of a curve at a step: of the nearest point before it.
function valueAt([steps, values], step) {
  let found = null;
  for (let k = 0; k < steps.length && steps[k] <= step; k++)
    if (values[k] !== null) found = values[k];
  return found === null ? values[0] : found;
}

const line = (run, [steps, values], name, state, more) => ({
  type: "scatter",
  x: xOf(run, steps, state),
  y: values,
  name: plain(name),
  hovertemplate: `%{y:.5~g}<extra>${plain(name)}</extra>`,
  ...more
});

// Runs after this one whose curve is the same: they are drawn over it, so it is drawn wider.
function countSame(report, state, r, key) {
  const text = (run) => JSON.stringify([run.curves[key], run.axis[state.axis]]), own = text(report.runs[r]);
  return report.runs.filter((run, other) => other > r && text(run) === own).length;
}

function curveTraces(chart, report, state) {
  const traces = [], several = report.runs.length > 1;
  const present = chart.curves.filter(([key]) => report.runs.some((run) => run.curves[key]));
  report.runs.forEach((run, r) => {
    present.forEach(([key, label], c) => {
      const curve = run.curves[key];
      if (!curve || state.hidden.has(run.label)) return;
      const name = several ? run.label + (c ? `: ${label}` : "") : label;
      const mode = MODES[key.split(/[ _]/)[0]] || "lines", smooths = curve.smoothed && state.smoothing > 0;
      const style = look(several ? r : c, report, state);
      const width = (mode === "lines" ? 2.2 : 1.5) + (several ? 2 * Math.min(countSame(report, state, r, key), 4) : 0);
      const group = {
        mode,
        marker: {size: mode === "markers" ? 4 : 6, color: style.color},
        legendgroup: `${r}-${c}`,
        showlegend: !several || (chart.id === "loss" && c === 0)
      };
      if (smooths && state.raw)
        traces.push(line(
            run, curve.raw, `${name}, raw`, state,
            {...group, showlegend: false, opacity: 0.35, line: {...style, width: 1}}));
      const points = smooths ? smoothed(curve.mean || curve.raw, state.smoothing) : curve.raw;
      traces.push(line(run, points, name, state, {...group, line: {...style, width}}));
    });
  });
  return traces;
}

// Spikes, skipped steps and, for one run, checkpoints on the curve of a chart.
function eventTraces(report, state, key) {
  const several = report.runs.length > 1;
  return report.runs.flatMap((run, r) => {
    const curve = run.curves[key];
    if (!curve || state.hidden.has(run.label)) return [];
    return Object.entries(MARKS).flatMap(([kind, symbol]) => {
      const found = run.events.filter((e) => e[2] === kind && (kind !== "spike" || e[3].startsWith(key)));
      if (!found.length || (kind === "checkpoint" && (several || key !== "loss"))) return [];
      const at = kind === "spike" || !state.smoothing ? curve.raw :
                                                        smoothed(curve.mean || curve.raw, state.smoothing);
      return [{
        type: "scatter",
        mode: "markers",
        name: plain(several ? `${run.label}: ${kind}` : kind),
        showlegend: !several,
        x: xOf(run, found.map((e) => e[0]), state),
        y: found.map((e) => valueAt(at, e[0])),
        marker: {
          symbol,
          size: 9,
          line: {width: 1, color: several ? look(r, report, state).color : state.card},
          color: kind === "checkpoint" ? look(2, report, state).color : state.dark ? "#f87171" : "#b91c1c"
        },
        text: found.map((e) => plain(`step ${e[0]}: ${e[3]}`.slice(0, 120))),
        hovertemplate: `%{text}<extra>${plain(kind)}</extra>`
      }];
    });
  });
}

// A dotted line where a run was resumed.
function resumeLines(report, state) {
  const line = {color: state.muted, width: 1, dash: "dot"};
  return report.runs.flatMap((run) => {
    const steps = run.events.filter((e) => e[2] === "resume" && e[0] > 0).map((e) => e[0]);
    return xOf(run, steps, state).map((x) => ({type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line}));
  });
}
