"""Pieces of an HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = (
    "body{font:15px sans-serif;max-width:72em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:left;vertical-align:top}"
    ".long{overflow-wrap:anywhere;min-width:12em}"
    ".bad{color:#a00}svg{max-width:100%;height:auto}"
)


def document(title: str, body: str) -> str:
    """The whole file. ``body`` is HTML, ``title`` is text."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )


def svg(figure: Figure) -> str:
    """The figure as an element."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return element(out.getvalue())


def element(picture: str) -> str:
    """An SVG file as an element: without what stands before it."""
    return picture[picture.index("<svg") :]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Equal-keyed rows as an HTML table."""
    if not rows:
        return "<p>none</p>"
    heads = "".join(f"<th>{html.escape(str(head))}</th>" for head in rows[0])
    body = "".join("<tr>" + "".join(map(_cell, row.values())) + "</tr>" for row in rows)
    return f"<table><tr>{heads}</tr>{body}</table>"


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    # A digest or a path has no place to break a line: it may break anywhere, other words nowhere.
    long = ' class="long"' if max(map(len, text.split()), default=0) > 24 else ""
    code = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return f"<td{long}>{code}</td>"
