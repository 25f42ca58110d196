"""Pictures: complete, with stable colours for names, and with a note on omissions."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from attnbench.analysis.results import Results
from attnbench.analysis.sanity import SystemLoad
from attnbench.plugins import catalogue, plugs
from attnbench.reports import Picture, Report, plotted_metrics, style
from tests import journals

DRAWN: dict[str, Report] = {
    name: report for name, report in plugs("attnbench.reports", "REPORT").items() if report.draw is not None
}
POINTS = journals.workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 2048))


def drawn(name: str, results: Results) -> Picture:
    draw = DRAWN[name].draw
    assert draw is not None
    picture = draw(results)
    assert picture is not None
    return picture


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Picture]:
    results = journals.write(tmp_path_factory.mktemp("run"), POINTS)
    return {name: drawn(name, results) for name in DRAWN}


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_each_is_a_whole_svg_and_a_png(name: str, pictures: dict[str, Picture], tmp_path: Path) -> None:
    picture = pictures[name]
    root = ET.fromstring(picture.save(tmp_path / "picture.svg").read_text())  # noqa: S314 - written a moment ago
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert picture.save(tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert picture.png == (tmp_path / "picture.png").read_bytes()


@pytest.mark.parametrize("name", ["latency_plot", "memory_plot"])
def test_captions_name_what_is_not_shown_and_why(name: str, pictures: dict[str, Picture]) -> None:
    picture = pictures[name]
    assert "naive_loop at 2048 (timeout (predicted))" in picture.caption
    assert 'sdpa_math at 2048 in "causal", "causal module" (crashed)' in picture.caption
    assert 'torch_mha at 128, 2048 in "no mask", "causal" (unsupported)' in picture.caption  # and drawn in others


def test_ratios_beyond_the_plot_are_at_its_edge_with_their_numbers_and_on_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(journals.SPEEDS, "fused", (50e-3, 1.8, 2.0))
    picture = drawn("ratio_plot", journals.write(tmp_path, journals.workloads(seq_len=(128, 512)), ("sdpa", "fused")))
    (axes,) = picture.figure.axes
    heights = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert heights["sdpa"] == [1.0, 1.0]
    assert all(map(math.isnan, heights["fused"]))
    texts = [text.get_text() for text in axes.texts]
    assert [float(text.removeprefix("↑")) for text in texts] == pytest.approx([29.2, 38.5], rel=0.05)
    assert "mark ratios beyond the plot" in picture.caption
    assert "A bar that reaches the plot's edge ends beyond it." in picture.caption


def test_a_picture_of_sound_times_has_no_caveat_and_others_have_one_in_the_title(tmp_path: Path) -> None:
    points, names = journals.workloads(seq_len=(128, 512)), ("sdpa", "fused")
    sound = journals.write(tmp_path / "sound", points, names)
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    cut = journals.write(tmp_path / "cut", points, names, num_epochs=2, is_finished=False)
    for results, words in {
        sound: "",
        dataclasses.replace(sound, system_load=load): "DOUBTFUL: ",
        cut: "UNFINISHED: ",
        dataclasses.replace(cut, system_load=load): "UNFINISHED, DOUBTFUL: ",
    }.items():
        for name in ("latency_plot", "ratio_plot"):
            picture = drawn(name, results)
            assert picture.title == words + plotted_metrics.REPORT[name].summary
            assert ("too few processes for an interval" in picture.caption) is (results.elapsed_s is None)


def test_no_two_implementations_share_colour_and_marker() -> None:
    names = [*catalogue()["looks"], "fused+compile", "sdpa+compile", *(f"mine{number}" for number in range(30))]
    looks = style.looks(names)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(names)
    assert all(looks[name] == style.look(name) for name in catalogue()["looks"])
    assert looks["fused+compile"]["color"] == looks["fused"]["color"]
    few = style.looks([f"mine{number}" for number in range(6)])
    assert len({look["marker"] for look in few.values()}) == len(few)


def test_points_at_a_single_length_stand_apart(tmp_path: Path) -> None:
    found = journals.write(tmp_path, journals.workloads(seq_len=(512,)), ("sdpa", "fused", "bmm"))
    (axes,) = drawn("ratio_plot", found).figure.axes
    places = sorted(line.get_xdata()[0] for line in axes.get_lines() if line.get_label() in {"sdpa", "fused", "bmm"})
    assert all(after / before > 1.1 for before, after in pairwise(places))


def test_a_panel_has_one_length_alone(tmp_path: Path) -> None:
    points = journals.workloads(seq_len=(1,), kv_len=(128, 1024))
    (decoding,) = plotted_metrics.panels(journals.write(tmp_path / "decoding", points, ("sdpa", "fused")))
    assert (decoding.axis, decoding.other, decoding.lengths) == ("kv_len", "T=1", [128, 1024])
    points = (*journals.workloads(seq_len=(128, 512)), *journals.workloads(seq_len=(64,), kv_len=(256,)))
    found = list(plotted_metrics.panels(journals.write(tmp_path / "mixed", points, ("sdpa", "fused"))))
    assert {(panel.axis, panel.other, *panel.lengths) for panel in found} == {
        ("seq_len", "", 128, 512),
        ("seq_len", "S=256", 64),
    }


def test_the_picture_of_a_run_is_time_against_length_where_there_are_five(tmp_path: Path) -> None:
    few = journals.write(tmp_path / "few", journals.workloads(seq_len=(128, 512, 2048)), ("sdpa", "fused"))
    many = journals.write(tmp_path / "many", journals.workloads(seq_len=(64, 128, 256, 512, 1024)), ("sdpa", "fused"))
    assert plotted_metrics.usual(few) is None
    assert "against length" in drawn("picture", many).title
    for found in (few, many):
        (path,) = DRAWN["picture"].write(found, tmp_path)
        assert path.name == "picture.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()


def test_names_in_any_script_can_be_drawn(tmp_path: Path) -> None:
    named = journals.write(
        tmp_path / "run", POINTS[:1], ("sdpa", "liar", "注意力", "\u202eevil", "$\\frac{", "x" * 300, " ")
    )
    for report in DRAWN.values():
        report.write(named, tmp_path)


def test_built_in_names_look_different_and_stay_as_they_are() -> None:
    looks = {name: style.look(name) for name in catalogue()["looks"]}
    for part in ("color", "marker", "linewidth"):
        assert len({found[part] for found in looks.values()}) == len(looks) == 10
    assert (looks["sdpa"]["color"], looks["sdpa"]["marker"]) == ("#56B4E9", "X")


def test_of_many_groups_the_first_are_drawn_and_it_is_said_where_the_others_are(tmp_path: Path) -> None:
    points = journals.workloads(batch_size=(1, 2, 4, 8), num_heads=(4, 8), seq_len=(128, 512))
    many = journals.write(tmp_path / "run", points, ("sdpa", "fused"))
    picture = drawn("latency_plot", many)
    assert "2 more groups not plotted: see records.csv" in picture.caption
    names = [path.name for path in DRAWN["latency_plot"].write(many, tmp_path)]
    assert names == ["latency_plot.png"]


@pytest.mark.parametrize("num_panels", [1, 2])
def test_a_title_fits_a_picture_of_few_panels(tmp_path: Path, num_panels: int) -> None:
    """A title once left the picture."""
    points = journals.workloads(mask=("none", "causal")[:num_panels], seq_len=(2048,))
    found = journals.write(tmp_path, points, ("sdpa", "fused", "chunked"), num_epochs=1)
    for name in ("memory_plot", "ratio_plot", "latency_plot"):
        figure = drawn(name, found).figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        titles = [*figure.texts, *(axes.title for axes in figure.axes)]
        boxes = [each.get_window_extent(canvas.get_renderer()) for each in titles if each.get_text()]
        assert boxes
        assert all(0 <= box.x0 <= box.x1 <= figure.bbox.x1 for box in boxes), name
