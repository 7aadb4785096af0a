// Everything that is text: built as nodes, so that no text of a run is read as HTML.

function node(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const card = (title, unit, ...children) => node(
    "div", {class: "card"}, node("h2", {}, title, " ", node("span", {class: "unit"}, unit)), ...children);

function table(heading, rows, numbers) {
  const cell = (name) => (text, k) =>
      node(name, numbers.includes(k) ? {class: "number"} : {}, text instanceof Node ? text : String(text));
  return node(
      "table", {}, node("thead", {}, node("tr", {}, ...heading.map(cell("th")))),
      node(
          "tbody", {},
          ...rows.map((row) => node("tr", row.differs ? {class: "differs"} : {}, ...row.map(cell("td"))))));
}

const scrolled = (...content) => node("div", {class: "scroll"}, table(...content));

// A card that may be broken into pages.
function longCard(...content) {
  const made = card(...content);
  made.classList.add("long");
  return made;
}

// A run's name beside its line in the charts.
function runName(run, k, report, state) {
  const {color, dash} = look(k, report, state);
  return node("span", {class: `run ${dash}`, style: `--color: ${color}`}, run.label);
}

// Tiles of one run, or the table of several; a click on a heading sorts it.
function summaryOf(report, state) {
  if (report.runs.length === 1)
    return node(
        "div", {class: "tiles"},
        ...report.runs[0].summary.map(
            ([name, text]) => node("div", {class: "tile"}, node("b", {}, text), node("span", {}, name))));
  const {rows, names} = runTable(report), {name, down} = state.sort;
  const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b);
  const sorted = rows.map((values, k) => [values[names.indexOf(name)], k])
                     .sort(([a, j], [b, k]) => order(a, b) || j - k);
  const headings = names.map((heading) => {
    const button = node("button", {}, heading + (heading !== name ? "" : down ? " ↓" : " ↑"));
    button.addEventListener("click", () => sortBy(heading));
    return button;
  });
  const cells = (down ? sorted.reverse() : sorted).map(([, k]) => {
    const run = report.runs[k], box = node("input", {type: "checkbox", "aria-label": `show ${run.label}`});
    box.checked = !state.hidden.has(run.label);
    box.addEventListener("change", () => toggleRun(run.label));
    const texts = new Map(run.summary);
    return [
      node("label", {}, box, " ", runName(run, k, report, state)),
      ...names.slice(1).map((each) => texts.get(each) ?? "")
    ];
  });
  const numbers = names.map((_, k) => k).filter((k) => rows.some((row) => typeof row[k] === "number"));
  const button = node("button", {class: "plain"}, "CSV");
  button.addEventListener("click", () => saveCsv("runs.csv", [names, ...rows]));
  const found = card("Runs", button, scrolled(headings, cells, numbers));
  found.id = "run-table";
  return found;
}

// The figures of all runs, as numbers where they are, and their names.
function runTable(report) {
  const names = ["run", ...new Set(report.runs.flatMap((run) => run.summary.map(([name]) => name)))];
  const rows = report.runs.map((run) => {
    const values = new Map(run.summary.map(([name, text, number]) => [name, number ?? text]));
    return [run.label, ...names.slice(1).map((name) => values.get(name) ?? "")];
  });
  return {names, rows};
}

// The points of all curves.
const curveRows = (report) =>
    [["run", "curve", "step", "value"],
     ...report.runs.flatMap(
         (run) => Object.entries(run.curves)
                      .flatMap(([name, {raw: [steps, values]}]) =>
                                   steps.map((step, k) => [run.label, name, step, values[k] ?? ""])))];

function saveCsv(name, rows) {
  const cell = (value) => /[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value;
  const text = rows.map((row) => row.map(cell).join(",") + "\n").join("");
  const address = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  node("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// "12 s", "3:05" or "7:02:05".
function duration(seconds) {
  const whole = Math.round(seconds), two = (number) => String(number % 60).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole)}` : `${minutes}:${two(whole)}`;
}

// The state of a live run. It is stalled after ten times the usual time of a step (before the first one, a minute),
// twice its longest pause, and half a minute.
function liveOf(run, now, several) {
  const {updated, step, pause, left} = run.live, name = several ? `${run.label}: ` : "";
  const age = updated === null ? null : Math.max(0, now - updated);
  const last = age === null ? [] : [`last update ${duration(age)} ago`];
  if (left === 0) return node("div", {}, `${name}finished · ${last.join("")}`);
  const parts = [left === null ? "no step yet" : `${duration(left)} left`, ...last];
  if (age <= Math.max(10 * (step ?? 60), 2 * pause, 30)) return node("div", {}, name + parts.join(" · "));
  return node(
      "div", {}, name, node("span", {class: "kind spike"}, "stalled"),
      ` no event for ${duration(age)}` + (step ? `; a step takes ${step.toPrecision(2)} s` : ""));
}

function samplesOf(report) {
  const rows = report.runs.filter((run) => run.samples.length).flatMap((run) => {
    const samples = run.samples.map(([step, text]) => node(
        "div", {class: "sample"}, node("b", {}, `step ${step.toLocaleString("en")}`), node("pre", {}, text)));
    const heading = report.runs.length > 1 ? [node("h3", {}, run.label)] : [];
    return [...heading, node("div", {class: "samples"}, ...samples)];
  });
  return rows.length ? longCard("Samples", "over the run", ...rows) : null;
}

function eventsOf(report) {
  const several = report.runs.length > 1;
  const rows = report.runs.flatMap(
      (run) => run.events.map(
          ([step, time, kind, text]) =>
              [step.toLocaleString("en"), node("span", {class: `kind ${kind}`}, kind),
               ...(several ? [run.label] : []), text, time.slice(0, 19).replace("T", " ")]));
  const heading = ["step", "event", ...(several ? ["run"] : []), "", "time (UTC)"];
  return rows.length ? longCard("Events", "", scrolled(heading, rows, [0])) : null;
}

function evaluationsOf(report) {
  const several = report.runs.length > 1;
  const percent = (value) => (value === null ? "" : `${(100 * value).toFixed(2)}%`);
  const count = (value) => (value === null ? "" : value.toLocaleString("en"));
  const rows = report.runs.flatMap(
      (run) => Object.entries(run.evaluations).flatMap(([task, found]) => found.map(
          ([step, accuracy, norm, questions]) =>
              [task, ...(several ? [run.label] : []), count(step), percent(accuracy), percent(norm), count(questions)])));
  if (!rows.length) return null;
  const heading =
      ["task", ...(several ? ["run"] : []), "step", "accuracy", "accuracy, normalized", "questions"];
  const numbers = heading.map((_, k) => k).slice(several ? 2 : 1);
  return card("Evaluations", "", scrolled(heading, rows, numbers));
}

function configurationOf(report, onlyDifferences) {
  const several = report.runs.length > 1, differing = report.configuration.filter((row) => row[1]).length;
  const rows = report.configuration.filter((row) => !onlyDifferences || row[1])
                   .map(([name, differs, ...values]) => Object.assign([name, ...values], {differs}));
  if (!report.configuration.length) return null;
  const box = node("input", {type: "checkbox", id: "differences"});
  box.checked = onlyDifferences;
  const choice = several ? [node("label", {}, box, " only what differs")] : [];
  const heading = ["flag", ...report.runs.map((run) => (several ? run.label : "value"))];
  return longCard(
      "Configuration", several ? `${differing} of ${report.configuration.length} values differ` : "",
      ...choice, scrolled(heading, rows, []));
}

// Why a chart is not there: what the logs do not have.
function missingOf(report) {
  const runs = new Map();
  for (const run of report.runs)
    for (const reason of run.missing) runs.set(reason, [...(runs.get(reason) || []), run.label]);
  const texts = [...runs].map(
      ([reason, labels]) => reason + (labels.length < report.runs.length ? ` (${labels.join(", ")})` : ""));
  return texts.length ? `Not logged: ${texts.join("; ")}.` : "";
}
