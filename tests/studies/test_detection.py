"""The detection study plants the mistakes of ranks, too, and adds those of one module to its page."""

import json

import pandas as pd
import pytest
import typer

from studies.detection import parts, power, table
from studies.detection.__main__ import PAGE, _write_section, detect

OF_RANKS = list(power.kinds("ranks"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    (part,) = (each for each in parts.names([17], 50, "ranks") if each.endswith("float32"))
    parts.make(part, folder)
    return parts.assemble(folder, [part])


@pytest.fixture
def cells(made):
    return pd.DataFrame(made["mistakes"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mistake", OF_RANKS)
def test_each_mistake_of_ranks_is_planted_and_caught(mistake):
    found = list(power.cells(17, "float32", "ranks", [mistake]))
    assert not [each for each in found if isinstance(each, power.Absent)]
    whole = [each for each in found if each.inputs == power.EVERYTHING]
    assert whole
    assert all("world_size2" in each.workload and each.is_caught for each in whole)


def test_only_one_module_is_its_mistakes_and_nothing_honest(made, cells):
    assert len(list(parts.names([2, 17], 50))) == 2 * 4 + 1
    assert not [part for part in parts.names([2, 17], 50, "ranks") if not part.startswith("ranks-")]
    assert set(cells["mistake"]) == set(OF_RANKS)
    assert made["honest"] == []


def test_a_module_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="choose among masks, permutations"):
        detect(to=tmp_path, seeds=1, lengths="17", only="rank")


def test_a_section_takes_its_own_place_and_leaves_the_rest_of_the_page(made, tmp_path):
    page = tmp_path / PAGE
    above = f"{table.TITLE}\n| mistake |\n| {OF_RANKS[0]} |\n\n## Only the mistakes of `scores`\n\nKept.\n"
    page.write_text(above, encoding="utf-8")
    assert _write_section(made, tmp_path, "ranks") == 0
    once = page.read_text(encoding="utf-8")
    assert once.startswith(above)
    assert "11 known mistakes, of which 1 are in the\ntables above, tried at lengths 17 in float32." in once
    assert "Missed by our check: none." in once
    page.write_text(f"{once}\n## Only the mistakes of `weights`\n\nKept, too.\n", encoding="utf-8")
    missed = [
        {**each, "is_caught": each["is_caught"] and each["mistake"] != "zigzag_not_undone"} for each in made["mistakes"]
    ]
    assert _write_section({**made, "mistakes": missed}, tmp_path, "ranks") == 1
    again = page.read_text(encoding="utf-8")
    assert again.startswith(
        f"{above}\n## Only the mistakes of `weights`\n\nKept, too.\n\n## Only the mistakes of `ranks`\n"
    )
    assert again.count("## Only the mistakes of `ranks`") == 1
    assert "Missed by our check: zigzag_not_undone." in again


def test_the_kept_table_holds_every_cell(cells, tmp_path):
    path = tmp_path / "cells.csv"
    table.wide(cells).to_csv(path, index=False)
    kept = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert len(kept) == len(cells[["mistake", "form"]].drop_duplicates())
    found = {
        (row["mistake"], row["form"], row["dtype"], row["length"], row["workload"], asked): row[asked]
        for row in json.loads(kept.to_json(orient="records"))
        for asked in kept.columns[6:]
        if row[asked]
    }
    assert found == {
        (each.mistake, each.form, each.dtype, str(each.length), each.workload, f"{each.inputs}: {each.rule}"): str(
            each.is_caught
        )
        for each in cells.itertuples()
    }
