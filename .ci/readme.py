"""Rewrites the relative links and pictures of README.md to addresses on GitHub, since PyPI has the page alone.

``GITHUB_REPOSITORY=owner/name GITHUB_REF_NAME=v0.1.0 python .ci/readme.py`` rewrites the file. The release does so
before it builds.
"""

import os
import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def with_addresses(text: str, repository: str, tag: str) -> str:
    """The page with links to the files of a tag."""
    prose = CODE.split(text)
    for place in range(0, len(prose), 2):
        links = re.sub(r"(?<=\]\()(?!\w+:|#)", f"https://github.com/{repository}/blob/{tag}/", prose[place])
        files = f"https://raw.githubusercontent.com/{repository}/{tag}/"
        prose[place] = re.sub(r'(?<=<img src=")(?!\w+:)', files, links)
    return "".join(prose)


if __name__ == "__main__":
    README.write_text(
        with_addresses(README.read_text(), os.environ["GITHUB_REPOSITORY"], os.environ["GITHUB_REF_NAME"])
    )
