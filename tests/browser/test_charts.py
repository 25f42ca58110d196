"""The charts of TensorBoard's page, as a page asks for them by the names of Google Charts."""

import pytest

from attnbench.tracing.viewer import plugin
from tests.browser.chromium import Browser, find

pytestmark = pytest.mark.browser
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="charts.js"></script><script>
const V = google.visualization;
const made = (id) => Object.assign(document.createElement("div"), {id, style: "width: 500px"});
const place = (id = "") => document.body.appendChild(made(id));
const options = {height: 250, explorer: {}, hAxis: {title: "ms"}, series: {2: {type: "line", targetAxisIndex: 1}}};
new V.PieChart(place()).draw(V.arrayToDataTable([["name", "time"], ["aten::mm", 5], ["<b>", 3], ["none", 0]]), options);
new V.PieChart(place()).draw(V.arrayToDataTable([["name", "time"]]), options);
const both = V.arrayToDataTable([["x", "A", "B", "trend"], ["Forward_0", 1, 2, 3], ["Forward_0", 2, 3, 5]]);
new V.ComboChart(place()).draw(both, options);
const curve = V.arrayToDataTable([["ms", "MB"], [0, 1], [1, 2], [2, 1]]);
window.ready = 0;
window.line = new V.LineChart(place("curve"));
V.events.addListener(line, "ready", () => { window.ready += 1; });
line.draw(curve, options);
</script>"""
COUNT = "document.querySelectorAll({!r}).length"


def test_shapes_are_drawn_and_a_zoom_keeps_the_line(tmp_path):
    program = find()
    if program is None:
        pytest.skip("no Chromium here: install one (apt install chromium), or name it in ATTNBENCH_CHROMIUM")
    library = plugin.LIBRARY.read_text(encoding="utf-8")
    (tmp_path / "charts.js").write_text(f"{library}\n{plugin.script(*plugin.CHARTS)}", encoding="utf-8")
    (tmp_path / "page.html").write_text(PAGE, encoding="utf-8")
    with Browser(program, tmp_path / "profile") as page:
        page.open((tmp_path / "page.html").as_uri())
        page.wait("window.ready === 1")
        page.wait(f"{COUNT.format('.mark-arc path')} === 2")  # the empty one has a text
        assert page.wait("document.body.innerText.includes('no time here')")
        assert page.run(COUNT.format(".mark-rect path")) == 4 + 2  # and the parts of a brush
        wide = "document.querySelector('#curve .mark-line path').getBoundingClientRect().width"
        assert page.run(wide) > 300
        page.run("line.zoom([0.5, 1.5]); 1")
        page.wait("window.ready === 2")
        assert page.run(wide) > 300
        assert page.run("line.getChartLayoutInterface().getHAxisValue(0)") == 0.5
        assert page.problems == []
