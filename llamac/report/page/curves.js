"use strict";
// The curves of the charts, as traces of plotly.js. No text of a run reaches plotly unescaped: it reads a
// little markup in names and labels.

const DASHES = ["solid", "dot", "dash", "dashdot"];
const MARKS = {
  spike: "triangle-up",
  skipped: "x",
  checkpoint: "diamond-tall"
};

// The charts in order, with their curves. `unless`: left out where a run has that curve.
const CHARTS = [
  {
    id: "loss",
    title: "Loss",
    unit: "nats per token",
    wide: true,
    curves: [["loss", "training"]],
    events: true
  },
  {id: "lr", title: "Learning rate", unit: "", curves: [["lr", "learning rate"]], format: ".3~e"},
  {
    id: "grad_norm",
    title: "Gradient norm",
    unit: "before clipping",
    curves: [["grad_norm", "gradient norm"]],
    log: true
  },
  {
    id: "speed",
    title: "Speed",
    unit: "tokens per second",
    curves: [["tokens_per_s", "tokens/s"]],
    zero: true
  },
  {id: "mfu", title: "MFU", unit: "% of the device's peak", curves: [["mfu", "MFU"]], zero: true},
  {
    id: "tflops",
    title: "Compute",
    unit: "TFLOP/s",
    curves: [["tflops", "TFLOP/s"]],
    zero: true,
    unless: "mfu"
  },
  {
    id: "memory",
    title: "Memory",
    unit: "GiB",
    zero: true,
    curves: [["gpu_mem_gib", "GPU"], ["rss_gib", "process, peak"], ["system_mem_gib", "machine"]]
  },
  {
    id: "use",
    title: "Use",
    unit: "%; of the CPU, 100 is one core",
    zero: true,
    curves: [["gpu_percent", "GPU"], ["cpu_percent", "CPU"]]
  },
  {id: "power", title: "Power", unit: "W", curves: [["watts", "power"]], zero: true},
  {id: "temperature", title: "Temperature", unit: "°C", curves: [["celsius", "temperature"]]},
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

function line(run, steps, values, name, color, state, more) {
  return Object.assign(
      {
        type: "scatter",
        mode: "lines",
        x: xOf(run, steps, state),
        y: values,
        name: plain(name),
        line: {color, width: 1.8},
        hovertemplate: `%{y:.5~g}<extra>${plain(name)}</extra>`
      },
      more);
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
          opacity: smooth ? 0.35 : 1,
          showlegend: !smooth,
          legendgroup: `${r}-${c}`,
          line: {color, width: smooth ? 1 : 1.8, dash}
        }));
      if (smooth)
        traces.push(line(
            run, smooth[0], smooth[1], name, color, state,
            {legendgroup: `${r}-${c}`, line: {color, width: 2.2, dash}}));
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
      mode: "lines+markers",
      line: {color, width: 1.5, dash: several ? "dot" : "solid"},
      marker: {size: 6}
    })];
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
      traces.push({
        type: "scatter",
        mode: "markers",
        name: plain(several ? `${run.label}: ${kind}` : kind),
        x: xOf(run, found.map((e) => e[0]), state),
        y: found.map((e) => valueAt(kind === "spike" ? curve.raw : curve.smooth || curve.raw, e[0])),
        marker: {
          symbol,
          size: kind === "checkpoint" ? 9 : 10,
          line: {width: 1, color: state.card},
          color: kind === "checkpoint" ? shade(report.colors[several ? r : 2], state.dark) :
              state.dark               ? "#f87171" :
                                         "#b91c1c"
        },
        text: found.map((e) => plain(`step ${e[0]}: ${e[3]}`.slice(0, 120))),
        hovertemplate: `%{text}<extra>${plain(kind)}</extra>`
      });
    }
  });
  return traces;
}

// A dotted line where a run was resumed.
function resumeLines(report, state) {
  return report.runs.flatMap((run) => {
    const found = run.events.filter((e) => e[2] === "resume" && e[0] > 0);
    return xOf(run, found.map((e) => e[0]), state).map((x) => ({
                                                         type: "line",
                                                         xref: "x",
                                                         yref: "paper",
                                                         x0: x,
                                                         x1: x,
                                                         y0: 0,
                                                         y1: 1,
                                                         line: {color: state.muted, width: 1, dash: "dot"}
                                                       }));
  });
}
