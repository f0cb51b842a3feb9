"""No file imports one that imports it, by whatever chain: late imports and those for types alone are counted."""

from __future__ import annotations

import ast

from test_layers import ROOT, found_in, modules


def graph() -> dict[str, set[str]]:
    """Each file by its dotted name, and the files that it imports."""
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in modules()}
    paths = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found = {}
    for name, path in paths.items():
        others = set[str]()
        for node in found_in(path)[0]:
            for alias in node.names:
                whole = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                others.add(whole if whole in paths else whole.rpartition(".")[0])
        found[name] = others & paths.keys()
    return found


def circles() -> list[set[str]]:
    """Sets of files of which each imports every other, directly or by a chain."""
    below = graph()

    def reached(start: str) -> set[str]:
        found, left = set[str](), [start]
        while left:
            for other in below[left.pop()] - found:
                found.add(other)
                left.append(other)
        return found

    reach = {name: reached(name) for name in below}
    found: list[set[str]] = []
    for name in below:
        if name in reach[name] and not any(name in one for one in found):
            found.append({other for other in reach[name] if name in reach[other]})
    return found


def test_no_file_imports_one_that_imports_it() -> None:
    assert [sorted(one) for one in circles()] == []
