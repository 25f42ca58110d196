// The part of report.html that filters, sorts and draws. All texts come from data and are set as text, never as HTML.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const darkness = matchMedia("(prefers-color-scheme: dark)");
const PAGE = 100;
const MOST_PANELS = 12;
const SMALL = 11; // pixels of the smallest text of a chart
const SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]; // of implementations
const RING = "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0M-0.55,0A0.55,0.55,0,1,0,0.55,0A0.55,0.55,0,1,0,-0.55,0";
// Colour and shape of each verdict, in the order of the legend.
const LOOKS = {
  faster: ["#3b8fd4", "triangle-left"], equal: ["soft", "square"], slower: ["#dd6b20", "triangle-right"],
  undecided: ["soft", RING], doubtful: ["soft", "cross"], baseline: ["ink", "circle"], right: ["soft", "diamond"],
};
const METRICS = {
  ratio: { title: "time / baseline's time, below 1 is faster", column: "verdict" },
  time: { title: "time per call in seconds", column: "time per call" },
  memory: { title: "peak memory in bytes", column: "peak memory" },
  error: { title: "error / tolerance", column: "error" },
  rate: { title: "useful FLOP/s", column: "FLOP/s" },
};
const FIRST = ["workload", "length", "implementation", "time per call", "verdict"]; // columns shown at first
const places = Object.fromEntries(data.columns.map((column, place) => [column.heading, place]));
for (const row of data.rows) for (const [name, metric] of Object.entries(METRICS)) row[name] = row.keys[places[metric.column]] ?? null;
const has = Object.fromEntries(Object.keys(METRICS).map((name) => [name, data.rows.some((row) => row[name] !== null)]));
const implementations = byRatio();
const USUAL = { view: "dots", metric: has.ratio ? "ratio" : "time", scale: "log", sort: "", hide: "", cols: FIRST.map((name) => places[name]).join(","), rows: String(PAGE), find: "" };
for (const axis of data.axes) USUAL["f." + axis] = "";
let state = read();

// Implementations by their mean ratio, the fastest first; implementations without a ratio are last.
function byRatio() {
  const names = [...new Set(data.rows.map((row) => row.implementation))];
  const mean = {};
  for (const name of names) {
    const ratios = data.rows.filter((row) => row.implementation === name && row.ratio !== null).map((row) => row.ratio);
    mean[name] = ratios.length ? ratios.reduce((sum, ratio) => sum + ratio, 0) / ratios.length : Infinity;
  }
  return names.sort((a, b) => (mean[a] === mean[b] ? a.localeCompare(b) : mean[a] - mean[b]));
}
function valuesOf(axis) {
  const values = [...new Set(data.rows.map((row) => row.axes[axis]))];
  return values.sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
}
// Mix a colour with ink until it is visible on the page. Source: WCAG 2.2, criterion 1.4.11, a contrast of 3.
function readable(colour, isDark) {
  const luminance = (parts) => parts.map((part) => (part <= 10 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + [0.2126, 0.7152, 0.0722][place] * part, 0);
  const parts = [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
  const isPlain = () => (isDark ? (luminance(parts) + 0.05) / 0.0567 : 1.05 / (luminance(parts) + 0.05)) < 3;
  while (isPlain()) for (const place of [0, 1, 2]) parts[place] += ((isDark ? 255 : 0) - parts[place]) / 10;
  return `rgb(${parts.map(Math.round)})`;
}

// The address of the page has the state of the view, so that a link shows the same view.
function read() {
  const found = { ...USUAL };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in found) found[name] = value;
  if (!(found.metric in METRICS)) found.metric = USUAL.metric;
  return found;
}
function change(changes) {
  state = { ...state, ...changes };
  const kept = new URLSearchParams();
  for (const name of Object.keys(state)) if (state[name] !== USUAL[name]) kept.set(name, state[name]);
  history.replaceState(null, "", kept.size ? "#" + kept : location.pathname + location.search);
  show();
}
const listed = (text) => (text ? text.split(",") : []);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}
function choice(label, options, name) {
  const menu = make("select", { onchange: (event) => change({ [name]: event.target.value }) });
  for (const [value, text] of options) menu.append(make("option", { value, selected: state[name] === value }, text));
  return make("label", {}, label, menu);
}

function isShown(row) {
  for (const axis of data.axes) if (state["f." + axis] && String(row.axes[axis]) !== state["f." + axis]) return false;
  if (listed(state.hide).includes(row.implementation)) return false;
  return !state.find || row.text.some((text) => text.toLowerCase().includes(state.find.toLowerCase()));
}
function sorted(rows) {
  if (!state.sort) return rows;
  const place = parseInt(state.sort, 10), sign = state.sort.endsWith("d") ? -1 : 1;
  const key = (row) => (data.columns[place].is_number ? row.keys[place] : row.text[place]);
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  });
}

function controls() {
  const own = $("controls");
  own.replaceChildren(
    choice("Show", [["dots", "by implementation"], ["lines", "over length"]], "view"),
    choice("Metric", Object.entries(METRICS).filter(([name]) => has[name]).map(([name, metric]) => [name, metric.title]), "metric"),
    choice("Scale", [["log", "logarithmic"], ["linear", "linear"]], "scale"),
    ...data.axes.map((axis) =>
      choice(axis.replaceAll("_", " "), [["", "all"], ...valuesOf(axis).map((value) => [String(value), String(value)])], "f." + axis)),
  );
  const names = make("fieldset", {}, make("legend", {}, "Implementations"));
  for (const name of implementations) {
    const hidden = listed(state.hide);
    const toggle = () => change({ hide: (hidden.includes(name) ? hidden.filter((each) => each !== name) : [...hidden, name]).join(",") });
    const box = make("input", { type: "checkbox", onchange: toggle });
    box.checked = !hidden.includes(name);
    names.append(make("label", {}, box, name));
  }
  own.append(names, make("button", { type: "button", onclick: () => { state = { ...USUAL }; change({}); } }, "Reset"));
}

function table(rows) {
  const shown = listed(state.cols).map(Number).filter((place) => data.columns[place]);
  const head = make("tr");
  for (const place of shown) {
    const column = data.columns[place], is = parseInt(state.sort, 10) === place;
    const order = is ? (state.sort.endsWith("d") ? "descending" : "ascending") : "none";
    const next = is && order === "ascending" ? place + "d" : String(place);
    const button = make("button", { type: "button", title: column.explanation, onclick: () => change({ sort: next }) }, column.heading);
    head.append(make("th", { scope: "col", "aria-sort": order }, button));
  }
  const body = make("tbody");
  for (const row of sorted(rows).slice(0, Number(state.rows) || PAGE)) {
    const line = make("tr", { class: row.kind });
    for (const place of shown) {
      const tag = data.columns[place].heading === "implementation" ? "th" : "td";
      line.append(make(tag, { scope: tag === "th" && "row", "data-heading": data.columns[place].heading, class: data.columns[place].heading.replaceAll(" ", "-") + (data.columns[place].heading === "verdict" ? " is-" + row.verdict : "") }, row.text[place]));
    }
    body.append(line);
  }
  const caption = make("caption", {}, `${rows.length} of ${data.rows.length} cells`);
  $("table").replaceChildren(caption, make("thead", {}, head), body);
  const left = rows.length - (Number(state.rows) || PAGE);
  $("more").hidden = left <= 0;
  $("more").textContent = `Show ${Math.min(left, PAGE)} more of ${rows.length}`;
}
function columns() {
  const shown = listed(state.cols).map(Number);
  $("columns").replaceChildren(make("legend", {}, "Columns"), ...data.columns.map((column, place) => {
    const toggle = () => change({ cols: data.columns.map((_, other) => other).filter((other) => (other === place) !== shown.includes(other)).join(",") });
    const box = make("input", { type: "checkbox", onchange: toggle });
    box.checked = shown.includes(place);
    return make("label", { title: column.explanation }, box, column.heading);
  }));
}

// The Vega-Lite specification of a chart of the shown rows.
function spec(rows, ink, soft) {
  const metric = METRICS[state.metric];
  const scale = { type: state.scale, nice: false, ...(state.scale === "linear" && { zero: false }) };
  const panels = [...new Set(rows.map((row) => row.panel))];
  const few = new Set(panels.slice(0, MOST_PANELS));
  const points = rows.filter((row) => few.has(row.panel) && row[state.metric] > 0).map((row) => ({
    implementation: row.implementation, panel: row.panel, length: row.keys[places.length], group: row.text[places.workload],
    verdict: row.verdict, value: row[state.metric],
    low: row[state.metric + "_low"] ?? row[state.metric], high: row[state.metric + "_high"] ?? row[state.metric],
    time: row.text[places["time per call"]], compared: row.text[places.verdict], memory: row.text[places["peak memory"]] ?? "-",
  }));
  $("left-out").textContent = panels.length > MOST_PANELS && state.view === "dots" ? `The first ${MOST_PANELS} of ${panels.length} shapes are drawn: filter to see others.` : "";
  const order = implementations;
  const forms = markers(order);
  const tooltip = ["implementation", "group", "length", "time", "compared", "memory"].map((field) => ({ field, type: "nominal" }));
  const present = Object.keys(LOOKS).filter((name) => points.some((point) => point.verdict === name));
  const verdicts = { domain: present, range: present.map((name) => ({ ink, soft })[LOOKS[name][0]] ?? LOOKS[name][0]) };
  const shapes = { domain: present, range: present.map((name) => LOOKS[name][1]) };
  const width = Math.max(160, $("chart").clientWidth - 40);
  const top = { orient: "top", columns: width < 600 ? 3 : present.length };
  const color = state.view === "lines"
    ? { field: "implementation", type: "nominal", title: null, sort: order, scale: { domain: order, range: order.map((name) => readable(data.colours[name], darkness.matches)) } }
    : { field: "verdict", type: "nominal", title: null, scale: verdicts, legend: top };
  const config = { background: null, font: "system-ui, sans-serif", view: { stroke: null }, axis: { labelColor: ink, titleColor: ink, gridColor: soft, gridOpacity: 0.25, domainColor: soft, tickColor: soft, labelLimit: 170, labelFontSize: SMALL, titleFontSize: SMALL, titleFontWeight: "normal" }, header: { labelColor: ink, title: null, labelLimit: 330, labelFontSize: SMALL + 1 }, legend: { labelColor: ink, titleColor: ink, labelLimit: 150, labelFontSize: SMALL } };
  const x = { field: "value", type: "quantitative", scale, title: metric.title, axis: { format: "~s", tickCount: 5 } };
  if (state.view === "lines") {
    const y = { ...x };
    return { config, width: width - 230, height: 380, data: { values: points }, layer: [
      { params: [{ name: "zoom", select: "interval", bind: "scales" }], mark: { type: "line", opacity: 0.7 },
        encoding: { x: { field: "length", type: "quantitative", scale: { type: "log", base: 2 }, title: "length" }, y, color, detail: { field: "group" } } },
      { mark: { type: "rule", strokeWidth: 1.5, opacity: 0.7 }, encoding: { x: { field: "length", type: "quantitative" }, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
      { mark: { type: "point", filled: true, size: 55 }, encoding: { x: { field: "length", type: "quantitative" }, y, color, tooltip,
        shape: { field: "implementation", type: "nominal", title: null, sort: order, scale: { domain: order, range: order.map((name) => forms[name]) } } } },
    ] };
  }
  const columns = Math.max(1, Math.min(3, few.size, Math.floor(width / 300)));
  const y = { field: "implementation", type: "nominal", sort: order, title: null };
  const shape = { field: "verdict", type: "nominal", title: null, scale: shapes, legend: top };
  const wide = Math.max(120, Math.floor((width - 190) / columns) - 24);
  if (wide < 260) x.title = metric.title.split(/(?<=,) /); // in lines
  const layers = [
    { mark: { type: "rule", strokeWidth: 2 }, encoding: { x: { ...x, field: "low" }, x2: { field: "high" }, y, color } },
    { mark: { type: "point", filled: true, size: 70, opacity: 1 }, encoding: { x, y, color, tooltip, shape } },
  ];
  if (state.metric === "ratio") layers.unshift({ mark: { type: "rule", color: soft }, encoding: { x: { datum: 1 } } });
  return { config, data: { values: points }, columns, resolve: { axis: { x: "independent" } }, facet: { field: "panel", type: "nominal", sort: panels },
    spec: { width: wide, height: { step: 17 }, layer: layers } };
}
// The shape of each implementation: neighbours in the order differ, and no two of one colour share a shape if possible.
function markers(order) {
  const found = {};
  order.forEach((name, place) => {
    const taken = order.slice(0, place).filter((other) => data.colours[other] === data.colours[name]).map((other) => found[other]);
    const from = SHAPES.map((_, step) => SHAPES[(place + step) % SHAPES.length]);
    found[name] = from.find((shape) => !taken.includes(shape)) ?? from[0];
  });
  return found;
}
let drawing = 0;
async function chart(rows) {
  const style = getComputedStyle(document.documentElement);
  const mine = ++drawing;
  const options = { actions: false, renderer: "svg", tooltip: { theme: darkness.matches ? "dark" : "light" } };
  const place = make("div", { "aria-hidden": "true" }); // screen readers get #chart's label, and the table
  await window.vegaEmbed(place, spec(rows, style.getPropertyValue("--ink").trim(), style.getPropertyValue("--soft").trim()), options);
  if (mine !== drawing) return; // a later call draws a newer chart
  $("chart").replaceChildren(place);
  $("chart").setAttribute("aria-label", `${METRICS[state.metric].title} of ${rows.length} cells; the table below has the same numbers`);
}

// Say that a table goes on where it is wider than its box.
function hints() {
  for (const hint of document.querySelectorAll(".hint")) hint.hidden = hint.nextElementSibling.scrollWidth <= hint.nextElementSibling.clientWidth + 1;
}

function show() {
  const rows = data.rows.filter(isShown);
  const focused = document.activeElement?.closest("#explore label, #explore th");
  controls();
  columns();
  table(rows);
  const again = focused && [...document.querySelectorAll("#explore " + focused.tagName)].find((each) => each.textContent === focused.textContent);
  again?.querySelector("select, input, button")?.focus(); // focus again: the controls were replaced
  hints();
  window.attnbenchDrawn = chart(rows);
}
$("find").addEventListener("input", (event) => change({ find: event.target.value }));
$("more").addEventListener("click", () => change({ rows: String(Number(state.rows) + PAGE) }));
darkness.addEventListener("change", show);
addEventListener("resize", () => { hints(); chart(data.rows.filter(isShown)); });
addEventListener("hashchange", () => { state = read(); show(); });
$("find").value = state.find;
$("explore").hidden = false;
show();
