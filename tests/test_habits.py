"""What a project says of itself is true: its version in each place, its changelog, and what it never does."""

from __future__ import annotations

import re
from pathlib import Path

import zerosim

ROOT = Path(__file__).parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {zerosim.__version__}\n" in text("CITATION.cff")
    sections = re.findall(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert sections[:2] == ["Unreleased", zerosim.__version__]


def test_license_and_citation_name_the_same_authors() -> None:
    assert "the zerosim authors" in text("LICENSE")
    assert 'name: "the zerosim authors"' in text("CITATION.cff")


def test_links_of_the_pages_beside_the_readme_lead_somewhere() -> None:
    for page in ("CHANGELOG.md", "SECURITY.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text(page)):
            assert (ROOT / target).exists(), f"{page}: {target}"


def test_nothing_is_unpickled_but_what_zerosims_own_processes_send() -> None:
    """SECURITY.md: the grader's parcels, and notes within a job over MPI."""
    loads = {}
    for path in sorted((ROOT / "zerosim").rglob("*.py")):
        found = re.findall(r"\b(?:pickle\.loads?|Unpickler|allow_pickle=True)\b", path.read_text("utf-8"))
        if found:
            loads[path.relative_to(ROOT / "zerosim").parts[0]] = found
    assert loads.keys() == {"comm", "grading"}


def test_no_file_opens_a_connection() -> None:
    """SECURITY.md: MPI connects processes; nothing else does."""
    network = r"^\s*(?:import|from) (?:socket|ssl|urllib|http|ftplib|smtplib|requests|httpx|aiohttp)\b"
    for path in sorted((ROOT / "zerosim").rglob("*.py")):
        assert not re.search(network, path.read_text("utf-8"), re.MULTILINE), path
