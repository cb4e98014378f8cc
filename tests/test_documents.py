"""The documents: what they link to is there, and readers find every page."""

import re
from functools import cache
from pathlib import Path

import pytest

from gateway.errors import GatewayError

ROOT = Path(__file__).resolve().parent.parent
PART = ROOT / "docs" / "configuration.intro.md"  # the beginning of configuration.md
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"))
    if path != PART
)
SOURCE = "".join(path.read_text("utf-8") for path in sorted((ROOT / "gateway").rglob("*.py")))
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?:(?!\1).)+\1")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")


@cache
def prose(page: Path) -> str:
    return _FENCE.sub("", (ROOT / page).read_text("utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub makes of the headings; equal ones are numbered."""
    found: list[str] = []
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        same = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.append(f"{slug}-{same}" if same else slug)
    return frozenset(found)


def targets(page: Path) -> list[str]:
    text = prose(page)
    plain = _CODE.sub("code", text)
    return [one for one in (*_LINK.findall(plain), *_REFERENCE.findall(plain)) if not _ELSEWHERE.match(one)]


def broken(page: Path) -> list[str]:
    found = []
    for target in targets(page):
        path, _, anchor = target.partition("#")
        place = (ROOT / page.parent / path).resolve() if path else ROOT / page
        if not place.exists() or not place.is_relative_to(ROOT):
            found.append(f"{target}: no such file")
        elif anchor and (place.suffix != ".md" or anchor not in anchors(place.relative_to(ROOT))):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_there_are_links_and_anchors() -> None:
    everything = [one for page in PAGES for one in targets(page)]
    assert len(everything) > 100
    assert sum("#" in one for one in everything) > 30


def test_what_counts_as_an_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "# What `sekisho` does: a, b & c\n\n```\n# no heading\n[no](nowhere)\n```\n## Again\n## Again\n"
        "[a](#what-sekisho-does-a-b--c) [b](#again-1) [c](page.md) [d](https://elsewhere.example) `[e](no)`\n"
        "[f](#no-heading) [g](other.md) [h](../page.md)\n",
        "utf-8",
    )
    monkeypatch.setattr("tests.test_documents.ROOT", tmp_path)
    page = Path("page.md")
    assert broken(page) == [
        "#no-heading: no such heading", "other.md: no such file", "../page.md: no such file"
    ]  # fmt: skip


def test_the_readme_leads_to_every_page() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in targets(Path("README.md"))}
    pages = {page for page in PAGES if page.parts[0] == "docs" and page.parts[1] != "adr"}
    assert {str(page) for page in pages if ROOT / page not in linked} == set()


def test_the_tests_that_the_security_page_names_are_there() -> None:
    named = set(re.findall(r"`([a-z_0-9]+/[\w/]+\.py)`", prose(Path("docs/security.md"))))
    assert len(named) > 40
    assert not [one for one in sorted(named) if not (ROOT / "tests" / one).is_file()]


def below(kind: type[GatewayError]) -> list[type[GatewayError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in below(child))]


def test_every_code_of_an_error_is_explained() -> None:
    raised = {one.code for one in below(GatewayError) if not one.__subclasses__()}
    raised |= set(re.findall(r'\bcode="([a-z_]+)"', SOURCE))
    errors = prose(Path("docs/api.md")).partition("## Errors")[2].partition("## Streams")[0]
    told = set(re.findall(r"`([a-z_]+)`", errors))
    assert len(raised) > 30
    assert sorted(raised - told) == []


def test_metrics_of_code_and_documents_are_the_same() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text("utf-8")
    texts = [(ROOT / page).read_text("utf-8") for page in PAGES]
    told = {name for text in texts for name in re.findall(r"(?<!:)\bsekisho_([a-z_]+[a-z])", text)}
    bare = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in told}
    assert not [name for name in sorted(bare) if not re.search(rf'"(sekisho_)?{name}"', SOURCE)]
    made = set(re.findall(r'\b(?:counter|gauge)\(\s*"([a-z_]+)"', SOURCE))
    assert len(made) > 15
    assert not [name for name in sorted(made) if f"sekisho_{name}" not in operations]


def test_every_module_has_its_row() -> None:
    rows = prose(Path("docs/architecture.md")).partition("## Files")[2].partition("## Imports")[0]
    found = sorted((ROOT / "gateway").iterdir())
    names = [one.name for one in found if one.suffix == ".py" and one.name != "__init__.py"]
    names += [f"{one.name}/" for one in found if (one / "__init__.py").exists()]
    assert [name for name in names if f"`{name}`" not in rows] == []


def test_documents_speak_of_no_machine_but_the_readers() -> None:
    private = re.compile(rf"{re.escape(str(ROOT))}/|{re.escape(str(Path.home()))}/")
    assert not [str(page) for page in PAGES if private.search((ROOT / page).read_text("utf-8"))]
