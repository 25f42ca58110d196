// The names under which the page of torch-tb-profiler looks for all of this.
"use strict";

window.google = {
  charts: { load: () => Promise.resolve(), setOnLoadCallback: (call) => call() },
  visualization: {
    DataTable,
    arrayToDataTable,
    events,
    ColumnChart: AxesChart,
    ComboChart: AxesChart,
    LineChart,
    PieChart,
    SteppedAreaChart: AxesChart,
    Table,
    Timeline,
  },
};
