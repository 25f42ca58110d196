// Charts with two axes: columns, stepped areas, lines, and columns with lines on a second axis.
"use strict";

class AxesChart extends Chart {
  /** How series number `index` is drawn: columns, steps or line. */
  shape() {
    return "line";
  }

  isOnRight(index) {
    return this.options.series?.[index]?.targetAxisIndex === 1;
  }

  get isStacked() {
    return Boolean(this.options.isStacked) && this.shape(0) !== "line";
  }

  get isContinuous() {
    return this.data.columns[0].type === "number";
  }

  paint(top) {
    this.series = this.data.series();
    const hasRight = this.series.some((_, index) => this.isOnRight(index));
    const bottom = this.legend(this.series.map((each) => each.label)) + 22 + (this.options.hAxis?.title ? 16 : 0);
    const left = 74;
    this.area = { left, top, width: this.width - left - (hasRight ? 74 : 24), height: this.height - top - bottom };
    this.domain = this.isContinuous ? this.range ?? this.reach(this.data.rows.map((row) => row[0])) : null;
    this.left = this.paintValues(false);
    this.right = hasRight ? this.paintValues(true) : this.left;
    this.paintDomain();
    this.plot = draw("g", {}, this.svg);
    const stacks = this.data.rows.map(() => 0);
    this.series.forEach((_, index) => this.paintSeries(index, stacks));
    this.paintSelection();
  }

  reach(values) {
    const known = values.filter((value) => Number.isFinite(value));
    return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  }

  x(value) {
    const [low, high] = this.domain;
    return this.area.left + ((value - low) / (high - low || 1)) * this.area.width;
  }

  band(row) {
    const width = this.area.width / Math.max(1, this.data.rows.length);
    return { start: this.area.left + row * width, width };
  }

  /** Draw one axis of values with its grid; returns where on the page a value stands. */
  paintValues(isRight) {
    const mine = this.series.filter((_, index) => this.isOnRight(index) === isRight);
    const values = this.data.rows.flatMap((row) =>
      this.isStacked
        ? [mine.reduce((sum, each) => sum + Math.max(0, row[each.column] ?? 0), 0)]
        : mine.map((each) => row[each.column]),
    );
    const [least, most] = this.reach([0, ...values]);
    const marks = steps(least, most, Math.max(2, this.area.height / 45));
    const gap = marks.length > 1 ? marks[1] - marks[0] : 1;
    const high = marks.at(-1) < most ? marks.at(-1) + gap : Math.max(marks.at(-1), least + (most > least ? 0 : 1));
    const low = marks[0] > least ? marks[0] - gap : marks[0];
    if (high > marks.at(-1)) marks.push(high);
    if (low < marks[0]) marks.unshift(low);
    const { left, top, width, height } = this.area;
    const y = (value) => top + height - ((value - low) / (high - low || 1)) * height;
    const edge = isRight ? { x: left + width + 6, "text-anchor": "start" } : { x: left - 6, "text-anchor": "end" };
    for (const mark of marks) {
      if (!isRight) draw("line", { x1: left, x2: left + width, y1: y(mark), y2: y(mark), stroke: FAINT }, this.svg);
      draw("text", { ...edge, y: y(mark) + 4 }, this.svg, number(mark, 3));
    }
    const title = isRight ? "" : this.options.vAxis?.title;
    const turned = { transform: `translate(13 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle" };
    if (title) draw("text", turned, this.svg, title);
    return y;
  }

  paintDomain() {
    const { left, top, width, height } = this.area;
    const y = top + height + 16;
    if (this.isContinuous) {
      for (const mark of steps(...this.domain, Math.max(2, width / 90))) {
        draw("text", { x: this.x(mark), y, "text-anchor": "middle" }, this.svg, number(mark, 3));
      }
    } else {
      const every = Math.ceil(30 / Math.max(1, this.band(0).width));
      this.data.rows.forEach((row, index) => {
        if (index % every) return;
        const { start, width: room } = this.band(index);
        const at = { x: start + room / 2, y, "text-anchor": "middle" };
        draw("text", at, this.svg, fitted(String(row[0]), room * every - 4));
      });
    }
    draw("line", { x1: left, x2: left + width, y1: top + height, y2: top + height, stroke: INK }, this.svg);
    const title = this.options.hAxis?.title;
    if (title) draw("text", { x: left + width / 2, y: y + 16, "text-anchor": "middle" }, this.svg, title);
  }

  paintSeries(index, stacks) {
    const shape = this.shape(index);
    if (shape === "line") this.paintLine(index);
    else this.data.rows.forEach((row, place) => this.paintBar(index, place, stacks, shape));
  }

  paintBar(index, place, stacks, shape) {
    const { column, label, tooltip } = this.series[index];
    const row = this.data.rows[place];
    const value = row[column] ?? 0;
    const y = this.isOnRight(index) ? this.right : this.left;
    const base = this.isStacked ? stacks[place] : 0;
    stacks[place] += this.isStacked ? value : 0;
    const bars = this.series.map((_, number_) => number_).filter((number_) => this.shape(number_) !== "line");
    const { start, width } = this.band(place);
    const beside = this.isStacked || shape === "steps" ? 1 : bars.length;
    const inset = shape === "steps" ? 0 : width * 0.19;
    const each = Math.min((width - 2 * inset) / beside, shape === "steps" ? Infinity : 90);
    const from = start + (width - each * beside) / 2 + (beside > 1 ? bars.indexOf(index) * each : 0);
    const [a, b] = [y(base), y(base + value)];
    const size = { x: from, width: Math.max(0.5, each), y: Math.min(a, b), height: Math.abs(a - b) };
    const bar = draw("rect", { ...size, fill: this.colour(index), "fill-opacity": shape === "steps" ? 0.75 : 1 }, this.plot);
    bar.classList.add("bar");
    const told = tooltip < 0 ? `${row[0]}\n${label}: ${number(value)}` : row[tooltip];
    this.explain(bar, told, Boolean(this.data.columns[tooltip]?.p?.html));
    bar.addEventListener("click", () => this.choose(place, column));
  }

  paintLine(index) {
    const { column } = this.series[index];
    const y = this.isOnRight(index) ? this.right : this.left;
    const points = this.data.rows
      .map((row, place) => [this.isContinuous ? row[0] : place, row[column]])
      .filter(([at, value]) => Number.isFinite(value) && (!this.domain || (at >= this.domain[0] && at <= this.domain[1])))
      .map(([at, value]) => [this.isContinuous ? this.x(at) : this.band(at).start + this.band(at).width / 2, y(value)]);
    if (!points.length) return;
    const d = points.map(([px, py], place) => `${place ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    draw("path", { d, fill: "none", stroke: this.colour(index), "stroke-width": 1.8, class: "line" }, this.plot);
  }

  paintSelection() {
    for (const { row, column } of this.isContinuous ? this.selection : []) {
      const index = this.series.findIndex((each) => each.column === column);
      if (index < 0 || !this.data.rows[row]) continue;
      const [at, value] = [this.x(this.data.rows[row][0]), this.left(this.data.rows[row][column])];
      draw("circle", { cx: at, cy: value, r: 4, fill: this.colour(index), stroke: "white", class: "chosen" }, this.plot);
    }
  }

  setSelection(selection = []) {
    super.setSelection(selection);
    this.plot?.querySelectorAll(".chosen").forEach((mark) => mark.remove());
    if (this.plot) this.paintSelection();
  }
}

class ColumnChart extends AxesChart {
  shape() {
    return "columns";
  }
}

class SteppedAreaChart extends AxesChart {
  shape() {
    return "steps";
  }
}

class ComboChart extends AxesChart {
  shape(index) {
    return this.options.series?.[index]?.type === "line" ? "line" : "columns";
  }
}

class LineChart extends AxesChart {
  paint(top) {
    super.paint(top);
    const { left, width } = this.area;
    const cover = draw("rect", { ...this.area, x: left, y: this.area.top, fill: "transparent" }, this.svg);
    cover.addEventListener("mousemove", (event) => this.tell(event));
    cover.addEventListener("mouseleave", () => {
      this.tooltip.style.display = "none";
    });
    if (!this.options.explorer) return;
    cover.style.cursor = "crosshair";
    const within = (event) => Math.min(Math.max(this.place(event), left), left + width);
    cover.addEventListener("mousedown", (event) => {
      const start = within(event);
      const mark = draw("rect", { ...this.area, x: start, y: this.area.top, width: 0, fill: "#0072B222" }, this.svg);
      const move = (moved) => {
        mark.setAttribute("x", Math.min(start, within(moved)));
        mark.setAttribute("width", Math.abs(within(moved) - start));
      };
      const up = (released) => {
        window.removeEventListener("mousemove", move);
        mark.remove();
        const ends = [start, within(released)].sort((a, b) => a - b);
        if (event.button === 0 && ends[1] - ends[0] > 5) this.zoom(ends.map((end) => this.valueAt(end)));
      };
      window.addEventListener("mousemove", move);
      window.addEventListener("mouseup", up, { once: true });
    });
    cover.addEventListener("contextmenu", (event) => {
      event.preventDefault();
      this.zoom(undefined);
    });
  }

  place(event) {
    return event.clientX - this.svg.getBoundingClientRect().left;
  }

  valueAt(x) {
    return this.domain[0] + ((x - this.area.left) / this.area.width) * (this.domain[1] - this.domain[0]);
  }

  zoom(range) {
    this.range = range;
    this.draw(this.data, this.options);
  }

  /** The values at the pointer. */
  tell(event) {
    if (!this.isContinuous || !this.data.rows.length) return;
    const at = this.valueAt(this.place(event));
    const row = this.data.rows.findLast((each) => each[0] <= at) ?? this.data.rows[0];
    const lines = this.series.map((each) => `${each.label}: ${number(row[each.column], 3)}`);
    this.tooltip.textContent = [`${this.data.label(0)}: ${number(row[0], 3)}`, ...lines].join("\n");
    const left = Math.min(this.place(event) + 14, this.width - 190);
    Object.assign(this.tooltip.style, { display: "block", whiteSpace: "pre", left: `${left}px`, top: `${this.area.top}px` });
  }

  getChartLayoutInterface() {
    return { getChartAreaBoundingBox: () => ({ ...this.area }), getHAxisValue: (x) => this.valueAt(x) };
  }
}
