"""Write the JavaScript library that draws charts in report.html, from the copy in vl-convert: `python -m tools.vega`.

The file begins with THIRD_PARTY_NOTICES, so that each report contains the licences of the library's parts. For another
version of the library, renew these notices: copy the files LICENSE of the packages that `npm install vega vega-lite
vega-embed` puts into node_modules.

Source: https://github.com/vega/vl-convert.
"""

from pathlib import Path

from attnbench.reports.explorer import LIBRARY

NOTICES = Path(__file__).parents[1] / "THIRD_PARTY_NOTICES"


def bundle() -> str:
    """Build the script, with the notices first; the only global name that it defines is `window.vegaEmbed`."""
    import vl_convert

    made = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    notices = NOTICES.read_text(encoding="utf-8")
    return f"/*!\n{notices}*/\n" + "(() => {" + made.replace("</script", "<\\/script") + "})();\n"


if __name__ == "__main__":
    LIBRARY.write_text(bundle(), encoding="utf-8")
