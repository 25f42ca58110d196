"""The description and the addresses of the package, which pyproject.toml cannot know: they depend on who publishes it.

On an index a relative link leads nowhere and a relative picture shows nothing. Where GITHUB_REPOSITORY is set (GitHub
Actions does), links, pictures and badges of the README lead to that repository, and the package's addresses, too.
Elsewhere: `GITHUB_REPOSITORY=owner/name nox -s package`. Without it the README stays as it is, and there are none.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^\[\]]*|!\[[^\]]*\]\([^)]*\))\]\((?!https?:|#|mailto:)([^)\s]+)\)")
RAW = "https://raw.githubusercontent.com"


def description(text: str, server: str, repository: str, revision: str) -> str:
    """The README with addresses in place of relative links; a badge's `../../` is the repository itself."""

    def absolute(found: "re.Match[str]") -> str:
        mark, label, target = found.groups()
        if target.startswith("../../"):
            address = f"{server}/{repository}/{target.removeprefix('../../')}"
        elif mark:
            address = f"{RAW}/{repository}/{revision}/{target}"
        else:
            address = f"{server}/{repository}/blob/{revision}/{target}"
        return f"{mark}[{LINK.sub(absolute, label)}]({address})"

    return LINK.sub(absolute, text)


def addresses(server: str, repository: str) -> dict[str, str]:
    """What an index shows with the description; the documentation is where .github/workflows/docs.yml puts it."""
    home = f"{server}/{repository}"
    changes = f"{home}/blob/HEAD/CHANGELOG.md"
    owner, _, name = repository.partition("/")
    pages = f"https://{owner.lower()}.github.io/{name}/" if server == "https://github.com" else f"{home}#readme"
    return {"Documentation": pages, "Repository": home, "Issues": f"{home}/issues", "Changelog": changes}


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    if repository:
        readme = description(readme, server, repository, os.environ.get("GITHUB_SHA", "HEAD"))
    setup(
        long_description=readme,
        long_description_content_type="text/markdown",
        project_urls=addresses(server, repository) if repository else {},
    )
