"""Pages in HTML that need no other file: headings, texts, tables, and figures as pictures inside.

In: texts and matplotlib figures. Out: HTML. Not here: what is shown, and writing files.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #eee }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
figure { margin: 1.5em 0 } img { max-width: 100% } pre { background: #f6f6f6; padding: .8em; overflow-x: auto }"""


def title(text: str, level: int = 2) -> str:
    """A heading of the page."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def words(text: str, tag: str = "p") -> str:
    """A paragraph, or a text as it stands in a tag "pre"."""
    return f"<{tag}>{html.escape(text)}</{tag}>"


def picture(figure: Any) -> str:
    """A figure as PNG inside the page; its caption is in the picture, and its text for those who cannot see it."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    code = base64.b64encode(data.getvalue()).decode()
    return f'<figure><img alt="{html.escape(figure.get_label())}" src="data:image/png;base64,{code}"></figure>'


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    lines = ["".join(f"<td>{html.escape(value)}</td>" for value in row) for row in rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def page(name: str, parts: Iterable[str]) -> str:
    """A page under a heading."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{STYLE}</style>"
    return "\n".join([head, title(name, 1), *parts]) + "\n"
