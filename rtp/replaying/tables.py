"""Tables for people, in Markdown, their columns aligned."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first and the last column to the left where they are words, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    words = [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(row, widths, words, strict=True)
        )
        for row in (head, *rows)
    ]
    rule = "|".join(
        ":" + "-" * (width + 1) if word else "-" * (width + 1) + ":"
        for width, word in zip(widths, words, strict=True)
    )
    return "\n".join(
        f"| {line} |" if i else f"| {line} |\n|{rule}|" for i, line in enumerate(lines)
    )


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
