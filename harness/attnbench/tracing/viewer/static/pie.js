// Shares of a whole as a ring, with the names beside it.
"use strict";

class PieChart extends Chart {
  paint(top) {
    const rows = this.data.rows.filter((row) => row[1] > 0);
    const total = rows.reduce((sum, row) => sum + row[1], 0);
    const hasLegend = this.options.legend !== "none";
    const room = hasLegend ? this.width * 0.5 : this.width;
    const radius = Math.max(20, Math.min(room, this.height - top) / 2 - 12);
    const centre = { x: room / 2, y: top + (this.height - top) / 2 };
    const hole = radius * (this.options.pieHole ?? 0);
    let angle = -Math.PI / 2;
    rows.forEach((row, index) => {
      const share = row[1] / total;
      this.paintSlice(index, row, share, { angle, centre, radius, hole });
      angle += share * 2 * Math.PI;
    });
    if (!rows.length) draw("text", { ...centre, "text-anchor": "middle" }, this.svg, "no time here");
    if (hasLegend) this.paintNames(rows, total, top);
  }

  paintSlice(index, row, share, { angle, centre, radius, hole }) {
    const turn = Math.min(share, 0.99999) * 2 * Math.PI;
    const at = (turned, distance) =>
      `${(centre.x + distance * Math.cos(turned)).toFixed(2)} ${(centre.y + distance * Math.sin(turned)).toFixed(2)}`;
    const isLarge = turn > Math.PI ? 1 : 0;
    const outer = `M${at(angle, radius)}A${radius} ${radius} 0 ${isLarge} 1 ${at(angle + turn, radius)}`;
    const inner = `L${at(angle + turn, hole)}A${hole} ${hole} 0 ${isLarge} 0 ${at(angle, hole)}Z`;
    const look = { d: outer + inner, fill: this.colour(index), stroke: "white", class: "slice" };
    const slice = draw("path", look, this.svg);
    const told = { value: number(row[1]), percentage: percent(share), both: `${number(row[1])} (${percent(share)})` };
    this.explain(slice, `${row[0]}\n${told[this.options.tooltip?.text] ?? told.both}`);
    slice.addEventListener("mouseenter", () => events.trigger(this, "onmouseover", { row: index, column: 1 }));
    slice.addEventListener("mouseleave", () => events.trigger(this, "onmouseout", { row: index, column: 1 }));
    if (share < 0.06) return;
    const [x, y] = at(angle + turn / 2, (radius + hole) / 2).split(" ");
    const label = { x, y: Number(y) + 4, "text-anchor": "middle", fill: inkOn(this.colour(index)) };
    draw("text", { ...label, "pointer-events": "none" }, this.svg, percent(share));
  }

  /** As many names as there is room for; the last line says how many more there are, and what they are worth. */
  paintNames(rows, total, top) {
    const left = this.width * 0.5 + 6;
    const most = Math.max(1, Math.floor((this.height - top - 8) / 17));
    const shown = rows.length <= most ? rows : rows.slice(0, most - 1);
    const first = top + 12 + Math.max(0, (this.height - top - 8 - most * 17) / 2);
    shown.forEach((row, index) => {
      const y = first + index * 17;
      draw("rect", { x: left, y: y - 9, width: 10, height: 10, fill: this.colour(index) }, this.svg);
      const name = draw("text", { x: left + 15, y }, this.svg, fitted(String(row[0]), this.width - left - 20));
      draw("title", {}, name, `${row[0]}: ${number(row[1])} (${percent(row[1] / total)})`);
    });
    const rest = rows.slice(shown.length);
    if (!rest.length) return;
    const share = percent(rest.reduce((sum, row) => sum + row[1], 0) / total);
    const y = first + shown.length * 17;
    draw("text", { x: left + 15, y, fill: "#666666" }, this.svg, `and ${rest.length} more, together ${share}`);
  }
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}
