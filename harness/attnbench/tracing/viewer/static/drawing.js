// What all charts share: SVG elements, colours, numbers, round steps of an axis, a legend, a tooltip, a selection.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const INK = "#222222";
const FAINT = "#d9d9d9";
// Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/, then lighter turns of the same.
const COLOURS = [
  "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#8c8c8c",
  "#66AAD1", "#E69E66", "#66C5AB", "#E0AFCA", "#F0C566", "#9AD2F2", "#F6EF8E", "#bababa",
];
const CHARACTER = 6.7; // width of an average character at 11 px

function draw(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent?.appendChild(made);
  return made;
}

function number(value, digits = 2) {
  if (typeof value !== "number") return String(value ?? "");
  const text = value.toLocaleString("en", { maximumFractionDigits: digits });
  return text === "-0" ? "0" : text;
}

function fitted(text, width) {
  const room = Math.max(1, Math.floor(width / CHARACTER));
  return text.length <= room ? text : `${text.slice(0, Math.max(1, room - 1))}\u2026`;
}

/** Dark on light colours, and light on dark ones. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 150 ? INK : "white";
}

/** Round values from about low to about high: 1, 2 or 5 times a power of ten apart. */
function steps(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let step = Math.ceil(low / size - 1e-9); step * size <= high + size * 1e-9; step += 1) found.push(step * size);
  return found;
}

class Chart {
  constructor(container) {
    this.container = container;
    this.selection = [];
  }

  draw(data, options = {}) {
    if (!this.container) return; // the page went on to another view before the data came
    this.data = data;
    this.options = options;
    this.container.style.position = "relative";
    this.clearChart();
    this.width = Math.max(200, this.container.clientWidth || 600);
    this.height = options.height ?? (this.container.clientHeight || 300);
    const size = { width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}` };
    this.svg = draw("svg", { ...size, "font-family": "sans-serif", "font-size": 11, fill: INK, role: "img" });
    this.svg.classList.add("attnbench-chart");
    this.container.appendChild(this.svg);
    this.tooltip = document.createElement("div");
    this.tooltip.className = "google-visualization-tooltip";
    Object.assign(this.tooltip.style, {
      position: "absolute", display: "none", pointerEvents: "none", background: "white", padding: "4px 8px",
      border: `1px solid ${FAINT}`, boxShadow: "0 1px 4px #0003", font: "12px sans-serif", zIndex: 10,
    });
    this.container.appendChild(this.tooltip);
    const title = options.title ?? "";
    if (title) draw("text", { x: this.width / 2, y: 16, "text-anchor": "middle", "font-size": 13 }, this.svg, title);
    this.paint(title ? 30 : 12);
    events.trigger(this, "ready");
  }

  clearChart() {
    this.container.replaceChildren();
  }

  colour(index) {
    const colours = this.options.colors?.length ? this.options.colors : COLOURS;
    return colours[index % colours.length];
  }

  /** Names with their colours in rows at the bottom; returns the height that they take. */
  legend(names) {
    if (this.options.legend === "none") return 0;
    const rows = [[]];
    let used = 0;
    names.forEach((name, index) => {
      const width = Math.min(this.width - 40, 26 + name.length * CHARACTER);
      if (used + width > this.width - 20 && rows.at(-1).length) {
        rows.push([]);
        used = 0;
      }
      rows.at(-1).push({ name, index, width });
      used += width;
    });
    rows.forEach((row, place) => {
      let x = (this.width - row.reduce((sum, each) => sum + each.width, 0)) / 2;
      const y = this.height - 8 - (rows.length - 1 - place) * 16;
      for (const each of row) {
        draw("rect", { x, y: y - 9, width: 10, height: 10, fill: this.colour(each.index) }, this.svg);
        draw("text", { x: x + 14, y }, this.svg, fitted(each.name, each.width - 16));
        x += each.width;
      }
    });
    return rows.length * 16 + 8;
  }

  /** Show `content` beside the pointer while it is over `element`; `isHtml` where the page itself has made it HTML. */
  explain(element, content, isHtml = false) {
    element.addEventListener("mousemove", (event) => {
      const box = this.container.getBoundingClientRect();
      if (isHtml) this.tooltip.innerHTML = content;
      else this.tooltip.textContent = content;
      this.tooltip.style.display = "block";
      this.tooltip.style.whiteSpace = "pre-line";
      const left = Math.min(event.clientX - box.left + 14, this.width - this.tooltip.offsetWidth - 4);
      const top = Math.min(event.clientY - box.top + 14, this.height - this.tooltip.offsetHeight - 4);
      Object.assign(this.tooltip.style, { left: `${Math.max(0, left)}px`, top: `${Math.max(0, top)}px` });
    });
    element.addEventListener("mouseleave", () => {
      this.tooltip.style.display = "none";
    });
  }

  choose(row, column) {
    this.selection = [{ row, column }];
    events.trigger(this, "select", {});
  }

  getSelection() {
    return this.selection;
  }

  setSelection(selection = []) {
    this.selection = selection;
  }
}
