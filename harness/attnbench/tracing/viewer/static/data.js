// Tables of data, as the page of torch-tb-profiler fills them: columns {type, label, role, p} and rows of plain values.
"use strict";

class DataTable {
  constructor() {
    this.columns = [];
    this.rows = [];
    this.properties = new Map();
  }

  addColumn(column) {
    this.columns.push(column);
  }

  addRow(row) {
    this.rows.push(row);
  }

  addRows(rows) {
    rows.forEach((row) => this.addRow(row));
  }

  setProperty(row, column, name, value) {
    this.properties.set(`${row}/${column}/${name}`, value);
  }

  property(row, column, name) {
    return this.properties.get(`${row}/${column}/${name}`);
  }

  label(column) {
    return this.columns[column].label ?? this.columns[column].id ?? "";
  }

  /** The columns of numbers to draw, each with the index of the column of its tooltips, or -1. */
  series() {
    const found = [];
    this.columns.forEach((column, index) => {
      if (index === 0) return;
      if (column.role === "tooltip") {
        if (found.length) found[found.length - 1].tooltip = index;
      } else {
        found.push({ column: index, label: this.label(index), tooltip: -1 });
      }
    });
    return found;
  }
}

function arrayToDataTable(rows) {
  const table = new DataTable();
  const [labels, ...values] = rows;
  labels.forEach((label, index) => {
    const isNumber = values.length > 0 && values.every((row) => typeof row[index] === "number" || row[index] === null);
    table.addColumn({ type: isNumber ? "number" : "string", label });
  });
  table.addRows(values);
  return table;
}

const listeners = new WeakMap();

const events = {
  addListener(chart, name, call) {
    if (!listeners.has(chart)) listeners.set(chart, []);
    listeners.get(chart).push({ name, call });
  },
  trigger(chart, name, detail) {
    (listeners.get(chart) ?? []).filter((one) => one.name === name).forEach((one) => one.call(detail));
  },
};
