// Bars along time, a row for each level; what is narrower than a pixel is drawn once for each pixel.
"use strict";

class Timeline extends Chart {
  paint(top) {
    const bars = this.data.rows.map(([level, name, told, start, end]) => ({ level, name, told, start, end }));
    const levels = [...new Set(bars.map((bar) => bar.level))];
    const first = Math.min(...bars.map((bar) => bar.start));
    const last = Math.max(...bars.map((bar) => bar.end));
    const area = { left: 12, width: this.width - 24, height: this.height - top - 24 };
    const x = (time) => area.left + ((time - first) / (last - first || 1)) * area.width;
    const row = area.height / Math.max(1, levels.length);
    for (const mark of steps(0, last - first, Math.max(2, area.width / 90))) {
      const at = x(first + mark);
      draw("line", { x1: at, x2: at, y1: top, y2: top + area.height, stroke: FAINT }, this.svg);
      const label = { x: at, y: this.height - 8, "text-anchor": mark ? "middle" : "start" };
      draw("text", label, this.svg, `${number(mark, 3)} ms`);
    }
    const colours = new Map();
    const taken = new Set();
    for (const bar of bars) {
      const [start, end] = [x(bar.start), x(bar.end)];
      const pixel = `${bar.level}/${Math.round(start)}`;
      if (end - start < 1 && taken.has(pixel)) continue;
      taken.add(pixel);
      if (!colours.has(bar.name)) colours.set(bar.name, this.colour(colours.size));
      this.paintBar(bar, { x: start, width: Math.max(1, end - start) }, top + levels.indexOf(bar.level) * row, row, colours);
    }
  }

  paintBar(bar, size, y, row, colours) {
    const place = { ...size, y: y + 3, height: Math.max(4, row - 6), fill: colours.get(bar.name) };
    const made = draw("rect", { ...place, rx: 2, stroke: "white", "stroke-width": size.width > 3 ? 0.6 : 0 }, this.svg);
    made.classList.add("bar");
    this.explain(made, bar.told);
    if (size.width < 6 * CHARACTER) return;
    const fill = inkOn(colours.get(bar.name));
    const label = { x: size.x + 5, y: y + row / 2 + 4, fill, "pointer-events": "none" };
    draw("text", label, this.svg, fitted(bar.name, size.width - 10));
  }
}
