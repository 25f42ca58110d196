// A table in pages, whose rows are sorted by a click on a column's name.
"use strict";

class Table extends Chart {
  draw(data, options = {}) {
    this.data = data;
    this.options = options;
    this.sort = { column: options.sortColumn ?? -1, isAscending: options.sortAscending ?? true };
    this.page = 0;
    this.paint();
    events.trigger(this, "ready");
  }

  paint() {
    this.clearChart();
    const rows = this.data.rows.map((_, index) => index);
    const { column, isAscending } = this.sort;
    if (column >= 0) rows.sort((a, b) => compared(this.data.rows[a][column], this.data.rows[b][column]) * (isAscending ? 1 : -1));
    const size = this.options.pageSize ?? rows.length;
    const table = document.createElement("table");
    table.className = "google-visualization-table-table";
    Object.assign(table.style, { borderCollapse: "collapse", width: "100%", font: "13px sans-serif" });
    this.paintHead(table.createTHead().insertRow());
    const body = table.createTBody();
    for (const row of rows.slice(this.page * size, (this.page + 1) * size)) this.paintRow(body.insertRow(), row);
    this.container.appendChild(table);
    if (rows.length > size) this.paintPages(Math.ceil(rows.length / size));
  }

  paintHead(head) {
    this.data.columns.forEach((_, index) => {
      const cell = document.createElement("th");
      const mark = index === this.sort.column ? (this.sort.isAscending ? " \u25b2" : " \u25bc") : "";
      cell.textContent = this.data.label(index) + mark;
      Object.assign(cell.style, { background: "#fafafa", border: `1px solid ${FAINT}`, padding: "6px", cursor: "pointer" });
      cell.addEventListener("click", () => {
        this.sort = { column: index, isAscending: this.sort.column === index && !this.sort.isAscending };
        this.page = 0;
        this.paint();
      });
      head.appendChild(cell);
    });
  }

  paintRow(made, row) {
    this.data.rows[row].forEach((value, column) => {
      const cell = made.insertCell();
      cell.textContent = number(value); // never HTML: names of kernels and operators come from outside
      const align = typeof value === "number" ? "right" : "left";
      Object.assign(cell.style, { border: `1px solid ${FAINT}`, padding: "4px 6px", textAlign: align });
      const style = this.data.property(row, column, "style");
      if (style) cell.style.cssText += `;${style}`;
      cell.title = this.data.property(row, column, "title") ?? "";
    });
  }

  paintPages(count) {
    const bar = document.createElement("div");
    bar.style.padding = "6px";
    const button = (text, page) => {
      const made = document.createElement("button");
      made.textContent = text;
      made.disabled = page < 0 || page >= count;
      made.addEventListener("click", () => {
        this.page = page;
        this.paint();
      });
      bar.appendChild(made);
    };
    button("\u25c0", this.page - 1);
    bar.append(` page ${this.page + 1} of ${count} `);
    button("\u25b6", this.page + 1);
    this.container.appendChild(bar);
  }
}

function compared(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}
