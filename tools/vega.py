"""`python -m tools.vega`: write the library that report.html draws with, from the copy in vl-convert.

It begins with THIRD_PARTY_NOTICES, so that the licences of its parts are in each report. Another version of the library
needs these read again: they are the files LICENSE of the packages below node_modules after `npm install vega vega-lite
vega-embed`.

Source: https://github.com/vega/vl-convert.
"""

from pathlib import Path

from attnbench.reports.explorer import LIBRARY

NOTICES = Path(__file__).parents[1] / "THIRD_PARTY_NOTICES"


def bundle() -> str:
    """Build the script, after the notices: its names are private, except `vegaEmbed` in `window`."""
    import vl_convert

    made = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    notices = NOTICES.read_text(encoding="utf-8")
    return f"/*!\n{notices}*/\n" + "(() => {" + made.replace("</script", "<\\/script") + "})();\n"


if __name__ == "__main__":
    LIBRARY.write_text(bundle(), encoding="utf-8")
