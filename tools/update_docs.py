#!/usr/bin/env python3
"""Rewrites the generated parts of the documentation and checks every relative link in it.

python tools/update_docs.py           rewrites; exit code 1 if a link is broken
python tools/update_docs.py --check   changes nothing; exit code 1 if something is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def environment_table() -> str:
    """The table of docs/environment.md, from the native module's own list."""
    from hopshard import _C

    rows = ["| Variable | Legal values | Default | Meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {legal} | {default} | {meaning} |"
        for name, legal, default, meaning in _C.env_variables()
    ]
    return "\n".join(rows)


GENERATED = {"environment": ("docs/environment.md", environment_table)}


def with_generated(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`."""
    pattern = re.compile(
        rf"(<!-- generated: {name} [^>]*-->\n).*?(<!-- end generated -->)", re.DOTALL
    )
    new, count = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if count != 1:
        raise SystemExit(f"expected one pair of markers of '{name}', found {count}")
    return new


def markdown_files() -> list[Path]:
    folders = ("docs", "examples", "benchmarks", "tests")
    return sorted(ROOT.glob("*.md")) + [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))
    ]


def broken_links() -> list[str]:
    """Relative links to files that do not exist, one line each."""
    problems = []
    for path in markdown_files():
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        for match in LINK.finditer(text):
            target = (match[1] or match[2]).split("#")[0]
            if not target or re.match(r"[a-z]+:", target):
                continue
            if not (path.parent / target).exists():
                problems.append(f"{path.relative_to(ROOT)}: no such file: {target}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check_only = parser.parse_args().check
    problems = broken_links()
    for name, (file, make_content) in GENERATED.items():
        path = ROOT / file
        old = path.read_text(encoding="utf-8")
        new = with_generated(old, name, make_content())
        if old != new and check_only:
            problems.append(f"{file}: out of date; run make docs")
        elif old != new:
            path.write_text(new, encoding="utf-8")
            print(f"rewrote {file}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
