"""`python -m tools.vega`: write the library that report.html draws with, from the copy in vl-convert.

Source: https://github.com/vega/vl-convert; Vega, Vega-Lite and Vega-Embed are under the BSD 3-clause licence.
"""

from attnbench.reports.explorer import LIBRARY


def bundle() -> str:
    """Build the script: its names are private, except `vegaEmbed` in `window`."""
    import vl_convert

    made = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return "(() => {" + made.replace("</script", "<\\/script") + "})();\n"


if __name__ == "__main__":
    LIBRARY.write_text(bundle(), encoding="utf-8")
