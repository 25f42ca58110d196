// The charts of torch-tb-profiler's page, drawn by Vega-Lite; the page uses the names of Google Charts.
"use strict";

const INK = "#222222";
const FAINT = "#d9d9d9";
// Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/, then lighter versions of the same colours.
const COLOURS = [
  "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#8c8c8c",
  "#66AAD1", "#E69E66", "#66C5AB", "#E0AFCA", "#F0C566", "#9AD2F2", "#F6EF8E", "#bababa",
];
const CHARACTER = 6.7; // width of an average character at 11 px
const LABELLED = 0.06; // a slice of a pie with a smaller share has no label

function number(value, digits = 2) {
  if (typeof value !== "number") return String(value ?? "");
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** The colour of text on a colour: dark on light colours, and light on dark ones. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? INK : "white";
}

const EMPTY = { data: { values: [{}] }, mark: { type: "text", fontSize: 13 }, encoding: { text: { value: "no time here" } } };

/** The plain text of a tooltip from the page; the tooltip may be HTML. */
function plain(text) {
  return new DOMParser().parseFromString(String(text), "text/html").body.innerText;
}

class Chart {
  constructor(container) {
    this.container = container;
    this.selection = [];
  }

  draw(data, options = {}) {
    if (!this.container) return; // the page went on to another view before the data came
    Object.assign(this, { data, options });
    this.width = Math.max(200, this.container.clientWidth || 600);
    this.height = options.height ?? (this.container.clientHeight || 300);
    this.colours = options.colors?.length ? options.colors : COLOURS;
    const columns = Math.max(1, Math.floor(this.width / 240));
    const legend = { orient: "bottom", title: null, labelLimit: 220, columns };
    const config = { font: "sans-serif", view: { stroke: null }, axis: { gridColor: FAINT }, range: { category: this.colours }, legend };
    const title = options.title ? { text: options.title, fontWeight: "normal", color: INK } : undefined;
    const size = { width: this.width, height: this.height, autosize: { type: "fit", contains: "padding" }, padding: 8 };
    const place = document.createElement("div");
    this.container.replaceChildren(place);
    const drawing = vegaEmbed(place, { ...size, background: null, title, config, ...this.spec() }, { actions: false, renderer: "svg", logLevel: 1 });
    this.drawing = drawing;
    drawing.then(({ view }) => {
      if (drawing !== this.drawing) return; // a later drawing has begun
      this.view = view;
      this.connect(view);
      events.trigger(this, "ready");
    });
  }

  inkOf(place) {
    return inkOn(this.colours[place % this.colours.length]);
  }

  connect(view) {
    view.addEventListener("click", (_, item) => {
      if (item?.datum?.column === undefined) return;
      this.selection = [{ row: item.datum.row, column: item.datum.column }];
      events.trigger(this, "select", {});
    });
  }

  clearChart() {
    this.drawing = null;
    this.container?.replaceChildren();
  }

  getSelection() {
    return this.selection;
  }

  setSelection(selection = []) {
    this.selection = selection;
  }
}

class PieChart extends Chart {
  spec() {
    const rows = this.data.rows.filter((row) => row[1] > 0);
    if (!rows.length) return EMPTY;
    const total = rows.reduce((sum, row) => sum + row[1], 0);
    const values = rows.map(([name, value], place) => ({
      name: String(name), value, place, ink: this.inkOf(place), text: `${number(value)} (${percent(value / total)})`,
      label: value / total < LABELLED ? "" : percent(value / total),
    }));
    const most = Math.max(1, Math.floor(this.height / 20) - 2);
    const legend = this.options.legend === "none" ? null : { orient: "right", columns: 1, symbolLimit: most };
    const hole = { expr: `min(width, height) / 2 * ${this.options.pieHole ?? 0}` };
    return {
      data: { values },
      encoding: { theta: { field: "value", type: "quantitative", stack: true }, order: { field: "place" } },
      layer: [
        {
          mark: { type: "arc", innerRadius: hole, stroke: "white" },
          encoding: {
            color: { field: "name", type: "nominal", scale: { domain: values.map((each) => each.name) }, legend },
            tooltip: [{ field: "name" }, { field: "text", title: "time" }],
          },
        },
        {
          mark: { type: "text", radius: { expr: "min(width, height) / 2 * 0.72" }, fill: { expr: "datum.ink" } },
          encoding: { text: { field: "label" } },
        },
      ],
    };
  }
}

/** Columns, steps or lines over one axis, each series with a colour. */
class AxesChart extends Chart {
  isLine(index) {
    return this.options.series?.[index]?.type === "line";
  }

  get isStacked() {
    return Boolean(this.options.isStacked);
  }

  /** A row for each value that is drawn. */
  values() {
    return this.data.series().flatMap(({ column, label, tooltip }, index) =>
      this.data.rows.map((row, place) => ({
        x: row[0], value: row[column], series: label, row: place, column, isLine: this.isLine(index),
        text: tooltip < 0 ? `${row[0]}, ${label}: ${number(row[column], 3)}` : plain(row[tooltip]),
      })),
    );
  }

  axis(name) {
    return { title: this.options[name]?.title ?? null, labelColor: INK, titleColor: INK, titleFontWeight: "normal" };
  }

  spec() {
    const labels = this.data.series().map((each) => each.label);
    const color = { field: "series", type: "nominal", title: null, scale: { domain: labels } };
    const texts = { labelExpr: "labels[datum.value]", labelAngle: 0, labelOverlap: true, labelLimit: 120 };
    const x = { field: "row", type: "ordinal", axis: { ...this.axis("hAxis"), ...texts } }; // several may have one label
    const y = { field: "value", type: "quantitative", axis: this.axis("vAxis"), stack: this.isStacked ? "zero" : null };
    const tooltip = { field: "text", type: "nominal", title: " " };
    const beside = this.isStacked ? {} : { xOffset: { field: "series", type: "nominal", sort: labels } };
    const layer = [{
      transform: [{ filter: "!datum.isLine" }],
      mark: { type: "bar", cursor: "pointer" },
      encoding: { x, y, color, tooltip, ...beside },
    }];
    if (this.data.series().some((_, index) => this.isLine(index))) {
      layer.push({
        transform: [{ filter: "datum.isLine" }],
        mark: { type: "line", point: true },
        encoding: { x, y: { ...y, stack: null, axis: { ...y.axis, grid: false, orient: "right" } }, color, tooltip },
      });
    }
    const params = [{ name: "labels", value: this.data.rows.map((row) => String(row[0])) }];
    return { params, data: { values: this.values() }, layer, resolve: { scale: { y: "independent" } } };
  }
}

class LineChart extends AxesChart {
  isLine() {
    return true;
  }

  /** The shown part of the horizontal axis. */
  get domain() {
    const known = this.data.rows.map((row) => row[0]).filter(Number.isFinite);
    return this.range ?? (known.length ? [Math.min(...known), Math.max(...known)] : [0, 1]);
  }

  spec() {
    const [low, high] = this.domain;
    const x = { field: "x", type: "quantitative", scale: { domain: [low, high], nice: false }, axis: this.axis("hAxis") };
    const values = this.values().filter((each) => Number.isFinite(each.value));
    if (!values.length) return EMPTY;
    const most = Math.max(...values.map((each) => each.value));
    const y = { field: "value", type: "quantitative", scale: { domain: [0, most || 1] }, axis: this.axis("vAxis") };
    const color = { field: "series", type: "nominal", title: null, scale: { domain: this.data.series().map((each) => each.label) } };
    const brush = { name: "brush", select: { type: "interval", encodings: ["x"] } };
    const marks = { data: { name: "chosen" }, mark: { type: "point", filled: true, size: 90, stroke: "white" } };
    return {
      datasets: { chosen: [] },
      layer: [
        {
          data: { values },
          mark: { type: "line", strokeWidth: 1.8, clip: true },
          encoding: { x, y, color },
          params: this.options.explorer ? [brush] : [],
        },
        { ...marks, encoding: { x, y, color } },
      ],
    };
  }

  connect(view) {
    this.setSelection(this.selection);
    if (!this.options.explorer) return;
    let range;
    view.addSignalListener("brush", (_, chosen) => {
      range = chosen.x;
    });
    view.addEventListener("mouseup", () => {
      if (range && range[1] > range[0]) this.zoom(range);
    });
    this.container.oncontextmenu = (event) => {
      event.preventDefault();
      this.zoom(undefined);
    };
  }

  zoom(range) {
    this.range = range;
    this.draw(this.data, this.options);
  }

  setSelection(selection = []) {
    super.setSelection(selection);
    const labels = new Map(this.data?.series().map((each) => [each.column, each.label]));
    const rows = selection.filter(({ row }) => this.data?.rows[row]);
    const chosen = rows.map(({ row, column }) => {
      const found = this.data.rows[row];
      return { x: found[0], value: found[column], series: labels.get(column) };
    });
    this.view?.data("chosen", chosen).runAsync();
  }

  getChartLayoutInterface() {
    const [low, high] = this.domain;
    return { getChartAreaBoundingBox: () => ({ left: 0, width: 1 }), getHAxisValue: (x) => low + x * (high - low) };
  }
}

/** Bars along a time axis, a row for each level; of bars narrower than a pixel, only one is drawn in each pixel. */
class Timeline extends Chart {
  spec() {
    const first = Math.min(...this.data.rows.map((row) => row[3]));
    const last = Math.max(...this.data.rows.map((row) => row[4]));
    const pixels = (this.width - 24) / (last - first || 1);
    const taken = new Set();
    const names = [...new Set(this.data.rows.map((row) => row[1]))];
    const values = [];
    for (const [level, name, text, start, end] of this.data.rows) {
      const pixel = `${level}/${Math.round((start - first) * pixels)}`;
      const width = (end - start) * pixels;
      if (width < 1 && taken.has(pixel)) continue;
      taken.add(pixel);
      const room = Math.floor(width / CHARACTER) - 1;
      const label = room < 5 ? "" : name.length <= room ? name : `${name.slice(0, room - 1)}\u2026`;
      const ink = this.inkOf(names.indexOf(name));
      values.push({ level, name, text, label, ink, start: start - first, end: Math.max(end, start + 1 / pixels) - first });
    }
    const x = { field: "start", type: "quantitative", axis: { title: "ms", grid: true, tickCount: 8 } };
    const y = { field: "level", type: "ordinal", sort: null, axis: null };
    return {
      data: { values },
      layer: [
        {
          mark: { type: "bar", stroke: "white", strokeWidth: 0.4 },
          encoding: { x, x2: { field: "end" }, y, color: { field: "name", type: "nominal", scale: { domain: names }, legend: null }, tooltip: { field: "text", title: " " } },
        },
        {
          mark: { type: "text", align: "left", dx: 4, fill: { expr: "datum.ink" } },
          encoding: { x, y, text: { field: "label" } },
        },
      ],
    };
  }
}
