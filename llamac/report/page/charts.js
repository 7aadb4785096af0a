// The charts: layout and look of each, for plotly.js.

function layoutOf(state, more) {
  const axis = {gridcolor: state.grid, zeroline: false, linecolor: state.muted, automargin: true};
  const base = {
    autosize: true,
    paper_bgcolor: state.card,
    plot_bgcolor: state.card,
    colorway: state.colors,
    font: {family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: state.text},
    margin: {l: 52, r: 14, t: 30, b: 40},
    hovermode: "x unified",
    hoverlabel: {bgcolor: state.card, bordercolor: state.grid, font: {color: state.text, size: 12}},
    legend: {
      orientation: "h",
      x: 0,
      xanchor: "left",
      y: 1,
      yanchor: "bottom",
      bgcolor: "rgba(0,0,0,0)",
      traceorder: "normal"
    },
    xaxis: {...axis},
    yaxis: {...axis}
  };
  for (const [key, value] of Object.entries(more))
    base[key] = typeof value === "object" && !Array.isArray(value) ? {...base[key], ...value} : value;
  return base;
}

const CONFIG = {
  displaylogo: false,
  displayModeBar: "hover",
  responsive: true,
  showTips: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  toImageButtonOptions: {format: "svg"}
};

// The horizontal axis of all charts over steps.
function axisOf(state) {
  const titles = {step: "step", tokens: "tokens", hours: `time in optimizer steps (${state.timeUnit})`};
  return {title: {text: titles[state.axis]}, range: state.range || undefined, autorange: !state.range};
}

function timeChart(chart, report, state) {
  const traces = curveTraces(chart, report, state);
  if (!traces.length) return null;
  if (["loss", "grad_norm"].includes(chart.id)) traces.push(...eventTraces(report, state, chart.id));
  // Automatic ticks: on a logarithmic axis of less than a decade they are evenly spaced numbers.
  const y = {type: chart.log || (chart.id === "loss" && state.log) ? "log" : "linear"};
  if (y.type === "log") y.exponentformat = "power";
  if (chart.zero && y.type === "linear") y.rangemode = "tozero";
  if (chart.format) y.tickformat = chart.format;
  const shows = traces.filter((trace) => trace.showlegend).length > 1;
  const layout = layoutOf(state, {
    showlegend: shows,
    margin: {l: 52, r: 14, t: shows ? 24 : 8, b: 40},
    shapes: resumeLines(report, state),
    yaxis: y,
    uirevision: state.axis + (chart.id === "loss" ? state.log : ""),
    xaxis: {...axisOf(state), hoverformat: {step: ",d", tokens: ",.6~s", hours: ".4~g"}[state.axis]}
  });
  return {traces, layout};
}

// A row per rank: one that differs from the others has another color.
function rankChart(run, values, unit, state) {
  const {steps, hosts} = run.ranks;
  return {
    height: Math.min(120 + 16 * hosts.length, 600),
    traces: [{
      type: "heatmap",
      x: xOf(run, steps, state),
      y: hosts.map((_, rank) => rank),
      z: hosts.map((_, rank) => values.map((readings) => readings[rank] ?? null)),
      text: hosts.map((host, rank) => steps.map((step) => plain(`rank ${rank} on ${host}, step ${step}`))),
      hovertemplate: `%{z:.5~g} ${unit}<extra>%{text}</extra>`,
      colorscale: "Cividis",
      colorbar: {thickness: 10, outlinewidth: 0}
    }],
    layout: layoutOf(state, {
      hovermode: "closest",
      margin: {l: 52, r: 14, t: 8, b: 40},
      xaxis: axisOf(state),
      yaxis: {title: {text: "rank"}, autorange: "reversed", dtick: hosts.length > 10 ? undefined : 1}
    })
  };
}

const BAR = {type: "bar", orientation: "h"};

// Each operation: the least that its limit allows, and the rest of its time.
function profileChart(profile, report, state) {
  const rows = [...profile.rows].reverse(), names = rows.map((row) => plain(row.name));
  const least = rows.map((row) => Math.min(row.limit_ms || 0, row.ms));
  const label = (row) => `${row.ms.toPrecision(3)} ms · ${(100 * row.share).toFixed(1)}%` +
      (row.limit_ms ? ` · ${(100 * row.limit_ms / row.ms).toFixed(0)}% of ${row.by}` : "");
  const hover = rows.map(
      (row) => `${plain(row.name)}, ${plain(row.category)}<br>${label(row)}<br>${row.calls} calls per step` +
          (row.limit_ms ? `<br>limit: ${row.limit_ms.toPrecision(3)} ms by ${plain(row.by)}` :
                          "<br>no known limit"));
  const both = {...BAR, y: names, customdata: hover, hovertemplate: "%{customdata}<extra></extra>"};
  const most = Math.max(...rows.map((row) => row.ms), 1e-9);
  return {
    height: 24 * rows.length + 90,
    traces: [
      {
        ...both,
        name: "least time that the limit allows",
        x: least,
        marker: {color: look(0, report, state).color}
      },
      {
        ...both,
        name: "above the limit",
        x: rows.map((row, k) => row.ms - least[k]),
        marker: {color: state.dark ? "#4b5563" : "#c3cad5"},
        text: rows.map(label),
        textposition: "outside",
        cliponaxis: false,
        textfont: {size: 11, color: state.text}
      }
    ],
    layout: layoutOf(state, {
      barmode: "stack",
      bargap: 0.25,
      hovermode: "closest",
      showlegend: true,
      xaxis: {title: {text: "ms per step"}, range: [0, 1.6 * most]},
      yaxis: {ticksuffix: " ", gridcolor: "rgba(0,0,0,0)", tickfont: {size: 11}}
    })
  };
}

const PATTERNS = ["", "/", "x"];  // of bars, as DASHES of lines

function shareChart(profile, report, state) {
  const traces = profile.shares.map(
      ([name, ms, share], k) => ({
        ...BAR,
        y: ["step"],
        x: [ms],
        name: plain(name),
        marker: {
          color: look(k, report, state).color,
          pattern: {shape: PATTERNS[Math.floor(k / report.colors.length) % PATTERNS.length], solidity: 0.2},
          line: {color: state.card, width: 1}
        },
        text: share > 0.04 ? `${plain(name)} ${(100 * share).toFixed(0)}%` : "",
        textposition: "inside",
        insidetextanchor: "middle",
        textangle: 0,
        hovertemplate: `${plain(name)}: ${ms.toPrecision(4)} ms, ${(100 * share).toFixed(1)}%<extra></extra>`
      }));
  return {
    height: 140,
    traces,
    layout: layoutOf(state, {
      barmode: "stack",
      hovermode: "closest",
      showlegend: true,
      margin: {l: 8, r: 8, t: 30, b: 4},
      legend: {y: -0.1, x: 0, xanchor: "left", yanchor: "top"},
      xaxis: {visible: false},
      yaxis: {visible: false}
    })
  };
}
