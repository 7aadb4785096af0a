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

function runNames(report, dark) {
  return report.runs.map(
      (run, k) => node(
          "span", {class: "run", style: `--color: ${shade(report.colors[k % report.colors.length], dark)}`},
          run.label));
}

function summaryOf(report) {
  if (report.runs.length === 1)
    return node(
        "div", {class: "tiles"},
        ...report.runs[0].summary.map(
            ([name, text]) => node("div", {class: "tile"}, node("b", {}, text), node("span", {}, name))));
  const names = [...new Set(report.runs.flatMap((run) => run.summary.map(([name]) => name)))];
  const rows = names.map(
      (name) => [name, ...report.runs.map((run) => (run.summary.find(([n]) => n === name) || ["", ""])[1])]);
  return node(
      "div", {class: "card"},
      node("div", {class: "scroll"}, table(["", ...report.runs.map((run) => run.label)], rows, [])));
}

function samplesOf(report) {
  const rows =
      report.runs.filter((run) => run.samples.length)
          .flatMap(
              (run) =>
                  [...(report.runs.length > 1 ? [node("h3", {}, run.label)] : []),
                   node(
                       "div", {class: "samples"},
                       ...run.samples.map(
                           ([step, text]) => node(
                               "div", {class: "sample"}, node("b", {}, `step ${step.toLocaleString("en")}`),
                               node("pre", {}, text))))]);
  const found = card("Samples", "over the run", ...rows);
  found.classList.add("long");
  return rows.length ? found : null;
}

function eventsOf(report) {
  const several = report.runs.length > 1;
  const rows = report.runs.flatMap(
      (run) => run.events.map(
          ([step, time, kind, text]) =>
              [step.toLocaleString("en"), node("span", {class: `kind ${kind}`}, kind),
               ...(several ? [run.label] : []), text, time.slice(0, 19).replace("T", " ")]));
  const heading = ["step", "event", ...(several ? ["run"] : []), "", "time (UTC)"];
  const found = card("Events", "", node("div", {class: "scroll"}, table(heading, rows, [0])));
  found.classList.add("long");
  return rows.length ? found : null;
}

function evaluationsOf(report) {
  const several = report.runs.length > 1,
        percent = (value) => (value === null ? "" : `${(100 * value).toFixed(2)}%`);
  const rows = report.runs.flatMap(
      (run) => Object.entries(run.evaluations)
                   .flatMap(
                       ([task, found]) => found.map(
                           ([step, accuracy, norm, questions]) =>
                               [task, ...(several ? [run.label] : []), step.toLocaleString("en"),
                                percent(accuracy), percent(norm),
                                questions === null ? "" : questions.toLocaleString("en")])));
  if (!rows.length) return null;
  const heading =
      ["task", ...(several ? ["run"] : []), "step", "accuracy", "accuracy, normalized", "questions"];
  return card("Evaluations", "", node("div", {class: "scroll"}, table(heading, rows, [
                                        1, 2, 3, 4, 5
                                      ].filter((k) => k > (several ? 1 : 0)))));
}

function configurationOf(report, onlyDifferences) {
  const several = report.runs.length > 1, differing = report.configuration.filter((row) => row[1]).length;
  const rows = report.configuration.filter((row) => !onlyDifferences || row[1])
                   .map(([name, differs, ...values]) => Object.assign([name, ...values], {differs}));
  if (!report.configuration.length) return null;
  const box = node("input", {type: "checkbox", id: "differences"});
  box.checked = onlyDifferences;
  const choice = several ? [node("label", {}, box, " only what differs")] : [];
  const found = card(
      "Configuration", several ? `${differing} of ${report.configuration.length} values differ` : "",
      ...choice,
      node(
          "div", {class: "scroll"},
          table(["flag", ...report.runs.map((run) => (several ? run.label : "value"))], rows, [])));
  found.classList.add("long");
  return found;
}

// Why a chart is not there: what the logs do not have.
function missingOf(report) {
  return report.runs
      .map((run) => {
        const missing = [...run.missing, ...(run.profile_missing ? [`profile: ${run.profile_missing}`] : [])];
        return missing.length ? `${report.runs.length > 1 ? `${run.label} has not logged` : "Not logged"}: ${
                                    missing.join("; ")}.` :
                                "";
      })
      .filter(Boolean)
      .join(" ");
}
