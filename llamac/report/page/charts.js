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

function timeChart(chart, report, state) {
  const traces = curveTraces(chart, report, state);
  if (!traces.length) return null;
  if (chart.id === "loss") traces.push(...validationTraces(report, state));
  if (chart.events || chart.id === "grad_norm")
    traces.push(...eventTraces(report, state, chart.curves[0][0]));
  const y = {type: chart.log || (chart.id === "loss" && state.log) ? "log" : "linear"};
  if (y.type === "log") Object.assign(y, {dtick: "D2", exponentformat: "power"});
  if (chart.zero && y.type === "linear") y.rangemode = "tozero";
  if (chart.format) y.tickformat = chart.format;
  const title = {
    step: "step",
    tokens: "tokens",
    hours: `time in optimizer steps (${state.timeUnit})`
  }[state.axis];
  const visible = traces.filter((t) => t.showlegend !== false).length;
  const layout = layoutOf(state, {
    showlegend: visible > 1,
    shapes: resumeLines(report, state),
    yaxis: y,
    uirevision: state.axis + (chart.id === "loss" ? state.log : ""),
    xaxis: {
      title: {text: title},
      hoverformat: state.axis === "hours" ? ".4~g" : ",.6~s",
      range: state.range || undefined,
      autorange: !state.range
    }
  });
  if (state.axis === "step") layout.xaxis.hoverformat = ",d";
  return {traces, layout};
}

function saturatedChart(report, state) {
  const traces = report.runs.flatMap(
      (run, r) => run.saturated[0].length ? [line(
                                                run, run.saturated[0], run.saturated[1], run.label,
                                                shade(report.colors[r % report.colors.length], state.dark),
                                                state, {mode: "markers", marker: {size: 4}})] :
                                            []);
  if (!traces.length) return null;
  return {
    traces,
    layout: layoutOf(
        state, {showlegend: report.runs.length > 1, yaxis: {type: "log"}, xaxis: {title: {text: "step"}}})
  };
}

function evaluationChart(report, state) {
  const several = report.runs.length > 1;
  const tasks = [...new Set(report.runs.flatMap((run) => Object.keys(run.evaluations)))];
  const traces = report.runs.flatMap((run, r) => tasks.filter((task) => run.evaluations[task]).map((task) => {
    const rows = run.evaluations[task], k = tasks.indexOf(task);
    const color = shade(report.colors[(several ? r : k) % report.colors.length], state.dark);
    return line(
        run, rows.map((row) => row[0]), rows.map((row) => 100 * row[1]),
        several ? `${run.label}: ${task}` : task, color, state,
        {mode: "lines+markers", marker: {size: 7}, line: {color, dash: DASHES[(several ? k : 0) % 4]}});
  }));
  if (!traces.length) return null;
  return {
    traces,
    layout: layoutOf(state, {
      showlegend: traces.length > 1,
      yaxis: {rangemode: "tozero"},
      xaxis: {title: {text: {step: "step", tokens: "tokens", hours: `time (${state.timeUnit})`}[state.axis]}}
    })
  };
}

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
  const bar = (name, x, color, more) => Object.assign(
      {
        type: "bar",
        orientation: "h",
        name,
        y: names,
        x,
        marker: {color},
        customdata: hover,
        hovertemplate: "%{customdata}<extra></extra>"
      },
      more);
  const most = Math.max(...rows.map((row) => row.ms), 1e-9);
  return {
    height: 24 * rows.length + 90,
    traces: [
      bar("least time that the limit allows", least, shade(report.colors[0], state.dark)),
      bar("above the limit", rows.map((row, k) => row.ms - least[k]), state.dark ? "#4b5563" : "#c3cad5", {
        text: rows.map(label),
        textposition: "outside",
        cliponaxis: false,
        textfont: {size: 11, color: state.text}
      })
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

function shareChart(profile, report, state) {
  const colors = report.colors;
  const traces = profile.shares.map(
      ([name, ms, share], k) => ({
        type: "bar",
        orientation: "h",
        y: ["step"],
        x: [ms],
        name: plain(name),
        marker: {
          color: shade(colors[k % colors.length], state.dark),
          opacity: k < colors.length ? 1 : 0.5,
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
