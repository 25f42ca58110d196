// The names of Google Charts under which the page of torch-tb-profiler uses charts and tables.
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
