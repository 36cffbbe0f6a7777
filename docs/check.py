"""Checks that the documents still fit the code. `make check` runs it; every finding is one line, and any is a failure.

- Relative links in all Markdown files lead to a file that exists, and to a heading that it has.
- Python examples in README.md and docs/ compile. They are not run.
- docs/cli.md names every command, docs/api.md every public name.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^([ \t]*)(```+|~~~+)[ \t]*(\S*)[^\n]*\n(.*?)^[ \t]*\2[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(.+?)\1")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", re.MULTILINE)


def documents() -> list[Path]:
    """All Markdown files outside hidden folders."""
    found = (path for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


def prose(text: str) -> str:
    """The text without its code."""
    return INLINE_CODE.sub("", FENCE.sub("", text))


def code(text: str) -> str:
    """Only the code, blocks and inline."""
    blocks = [match[4] for match in FENCE.finditer(text)]
    return "\n".join([*blocks, *(match[2] for match in INLINE_CODE.finditer(FENCE.sub("", text)))])


def anchors(text: str) -> set[str]:
    """What `#...` may name in a document, made from its headings as GitHub does."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = count = found.get(slug, -1) + 1
        if count:
            found[f"{slug}-{count}"] = 0
    return set(found)


def broken_links(document: Path, text: str) -> Iterator[str]:
    """Links within the repository that lead nowhere."""
    for match in LINK.finditer(prose(text)):
        link = match[1] or match[2]
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.is_relative_to(ROOT) or not target.exists():
            yield f"the link {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8")):
            yield f"the link {link} names no heading of {target.name}"


def broken_examples(document: Path, text: str) -> Iterator[str]:
    """Python blocks with a syntax error."""
    for block in FENCE.finditer(text):
        if block[3] != "python":
            continue
        first = text.count("\n", 0, block.start(4))
        try:
            compile("\n" * first + textwrap.dedent(block[4]), str(document), "exec")
        except SyntaxError as error:
            yield f"line {error.lineno}: the example does not compile: {error.msg}"


def commands(group: Any, prefix: str = "shardstore") -> Iterator[str]:
    """Every command line below a click group, as typed: `shardstore ls`."""
    context = click.Context(group, info_name=prefix)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{prefix} {name}"
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")


def all_commands() -> Iterator[str]:
    """The commands of `shardstore.cli`; none while it does not exist."""
    if importlib.util.find_spec("shardstore.cli") is None:
        return
    names = vars(importlib.import_module("shardstore.cli")).values()
    groups = [value for value in names if isinstance(value, click.Group)]
    if not groups:
        sys.exit("docs/check.py: shardstore.cli has no click group, so its commands can't be checked")
    yield from commands(groups[0])


def unnamed(page: str, names: list[str]) -> Iterator[str]:
    """The names that a page does not show in its code."""
    path = ROOT / "docs" / page
    text = code(path.read_text("utf-8")) if path.exists() else ""
    for name in names:
        if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            yield f"docs/{page}: {name} is not mentioned"


def findings() -> Iterator[str]:
    """Everything that is wrong."""
    for document in documents():
        text, name = document.read_text("utf-8"), document.relative_to(ROOT)
        yield from (f"{name}: {finding}" for finding in broken_links(document, text))
        if name.parts[0] in {"README.md", "docs"}:
            yield from (f"{name}: {finding}" for finding in broken_examples(document, text))
    yield from unnamed("cli.md", list(all_commands()))
    public = importlib.import_module("shardstore")
    yield from unnamed("api.md", list(getattr(public, "__all__", [])))


def main() -> int:
    """Print the findings; 1 if there are any."""
    sys.path.insert(0, str(ROOT))
    found = list(findings())
    for line in found:
        print(line)
    print(f"docs: {len(documents())} documents, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
