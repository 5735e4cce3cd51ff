"""The documentation says what the code does: commands print what is shown, tables equal the code, links resolve."""

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import weftline
import weftline.nodes.current
from weftline import errors
from weftline.cli.exit import exit_codes
from weftline.cli.main import COMMANDS, command
from weftline.engine import repository
from weftline.engine.llm import sequence
from weftline.engine.protocol import messages
from weftline.engine.scheduler import request
from weftline.engine.scheduler import workers as supervisor
from weftline.nodes.catalog import CATALOG, FAKES
from weftline.pipelines.render.reference import node_reference
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, Retry, SequencePolicy, Slo

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [*DOCS.rglob("*.md"), *TOP])
GUIDES = ["docs/first-pipeline.md", *(page for page in PAGES if page.startswith("docs/guides/"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
WORD = re.compile(r"[\w.+-]+|[^\w\s]")


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [body for kind, body in BLOCK.findall(text) if kind == language]


def without_code(text: str) -> str:
    return BLOCK.sub("", text)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)


def section(text: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no heading {heading!r}"
    return found[1]


def rows(text: str) -> list[tuple[str, ...]]:
    """Return the cells of the tables in a text, without heads and code marks."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")) for line in lines]
    return [row for row in cells if not set(row[0]) <= set("-|:") and row[0] not in ("state", "code", "option", "row")]


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for link in LINK.findall(without_code(read(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists():
            wrong.append(f"{link}: there is no {path}")
        elif anchor and anchor not in map(slug, headings(target.read_text("utf-8"))):
            wrong.append(f"{link}: {target.name} has no such heading")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_tests_and_files_that_are_named_exist(page: str) -> None:
    text = read(page)
    wrong = [f"{file}::{name}" for file, name in TEST.findall(text) if f"def {name}(" not in _source(file)]
    files = re.findall(r"`((?:weftline|shm|nodes|pipelines|engine|tests|examples|benchmarks)/[\w/.-]+\.\w+)`", text)
    wrong += [file for file in files if not (ROOT / file).exists()]
    assert wrong == []


@cache
def _source(file: str) -> str:
    path = ROOT / file
    return path.read_text("utf-8") if path.is_file() else ""


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_what_they_say(page: str) -> None:
    text = read(page)
    refused = set(re.findall(r"problems? in (\S+); nothing was started", text))
    for block in blocks(text, "python"):
        ast.parse(block)
    for block in blocks(text, "yaml"):
        name = block.partition("\n")[0].removeprefix("# ")
        if re.search(r"^weftline: 1$", block, re.MULTILINE) and name not in refused:
            load_yaml(block, page, ROOT / "examples")


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", read(page))}
    assert named - targets == set()
    assert {"make " + target for target in ("setup", "test", "test-slow", "test-versions")} <= set(
        re.findall(r"make [a-z-]+", read("CONTRIBUTING.md"))
    )


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    text = read("CHANGELOG.md")
    kinds = re.findall(r"^### (.+)$", text.partition("## [Unreleased]")[2].partition("\n## ")[0], re.MULTILINE)
    assert kinds == ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


# the guides


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Write every file that a guide shows into an empty folder of its own."""
    made = {}
    for guide in GUIDES:
        made[guide] = tmp_path_factory.mktemp("guide")
        for language in ("python", "yaml"):
            for block in blocks(read(guide), language):
                name = block.partition("\n")[0].removeprefix("# ")
                if re.fullmatch(r"\w+\.(py|yaml)", name):  # else a fragment
                    (made[guide] / name).write_text(block, "utf-8")
        shutil.copy(ROOT / "examples/data/photo.png", made[guide])
    return made


def _commands() -> list[tuple[str, str, str]]:
    """Return each command of the guides with what is shown below it."""
    found = []
    for guide in GUIDES:
        shown = "\n".join(blocks(read(guide), "console"))
        parts = re.split(r"^\$ ", shown, flags=re.M)[1:]
        found += [(guide, part.partition("\n")[0], part.partition("\n")[2]) for part in parts]
    return found


@pytest.mark.slow(but_first=2)
@pytest.mark.parametrize(
    ("guide", "command", "shown"),
    _commands(),
    ids=[f"{Path(guide).stem}: {command}" for guide, command, _ in _commands()],
)
def test_the_guides_commands_print_what_they_show(
    folders: Mapping[str, Path], guide: str, command: str, shown: str
) -> None:
    pytest.importorskip("torch")
    program, *words = shlex.split(command)
    start = ["-m", "weftline"] if program == "weftline" else []
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ended = subprocess.run(
        [sys.executable, *start, *words], cwd=folders[guide], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    shown_rows = [line for line in ended.stderr.splitlines() if not line.startswith(("loading ", "wrote ", "worker "))]
    shows_times = command.startswith("weftline run")  # in a table on standard error, behind the outputs
    printed = ended.stdout if ended.returncode == 0 else ""
    printed += "\n".join(shown_rows) if ended.returncode or shows_times else ""
    found, wanted = _words(printed), _words(shown)
    assert wanted
    assert len(found) == len(wanted) and all(map(_alike, found, wanted)), f"{printed}\n{ended.stderr}"


def _words(text: str) -> list[str]:
    """Return the words of an output with timings and rules left out: those differ from run to run."""
    text = re.sub(r"\b\d+\.\d\b", "N", text.replace("cuda:0", "cpu"))
    text = re.sub(r'File "[^"]*/', 'File "', text)  # folders differ from machine to machine
    return WORD.findall(re.sub(r"[─-]{2,}", "", text))


def _alike(found: str, wanted: str) -> bool:
    try:
        return float(found) == pytest.approx(float(wanted), abs=0.01)
    except ValueError:
        return found == wanted


# the reference


def test_every_error_has_its_heading_status_and_exit_code() -> None:
    text = read("docs/reference/errors.md")
    tree = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.WeftlineError)
    }
    assert [heading for heading in headings(text) if heading in tree] == list(tree)
    for name, kind in tree.items():
        about = section(text, name)
        assert f"status `{kind.status}`, exit code {kind.exit_code}" in " ".join(about.split()), name


def test_every_command_and_option_has_its_place() -> None:
    text = read("docs/reference/cli.md")
    assert [heading for heading in headings(text) if heading in COMMANDS] == list(COMMANDS)
    for name in COMMANDS:
        options = {max(one.opts, key=len) for one in command(name).params if one.param_type_name == "option"}
        shown_rows = set(re.findall(r"^\| `(?:-\w`, `)?(--[\w-]+)", section(text, name), re.MULTILINE))
        assert shown_rows == options, name


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    shown_rows = rows(section(read("docs/reference/cli.md"), "Exit codes"))
    assert shown_rows == [(str(code), meaning) for code, meaning in exit_codes().items()]


def test_the_page_of_nodes_is_up_to_date() -> None:
    text = read("docs/reference/nodes.md")
    assert text == node_reference(), "run: python -m weftline.pipelines.render.reference"
    assert [heading for heading in headings(text) if heading in CATALOG] == [
        name for name in CATALOG if name not in FAKES
    ]


def test_every_public_name_has_its_heading_and_sessions_all_their_methods() -> None:
    text = read("docs/reference/python.md")
    assert sorted(heading for heading in headings(text) if heading in weftline.__all__) == sorted(weftline.__all__)
    for name in (
        "Session",
        "RequestOptions",
        "Repository",
        "Result",
        "Health",
        "SequencePart",
        "Pipeline",
        "Batch",
        "current",
    ):
        kind = weftline.nodes.current.Current if name == "current" else getattr(weftline, name)
        about = section(text, name)
        infos = [info for info in vars(kind) if not info.startswith("_") and info not in ("get", "ids", "ports")]
        assert [info for info in infos if not re.search(rf"\b{info}\b", about)] == [], name
    options = {field.name for field in dataclasses.fields(weftline.RequestOptions)}
    assert {row[0] for row in rows(section(text, "RequestOptions"))} == options


def test_every_key_that_makes_a_step_is_explained_in_a_guide() -> None:
    shown_rows = " ".join(read(page) for page in GUIDES[1:])
    keys = [one.name for kind in (Step, BatchPolicy, Retry, SequencePolicy, Slo) for one in fields(kind)]
    unwritten = {"name", "options", "base_dir"}
    assert [key for key in keys if key not in unwritten and not re.search(rf"\b{key}\b", shown_rows)] == []


def test_the_architecture_has_every_package_up_to_the_second_level() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = [folder for folder in project["tool"]["setuptools"]["package-dir"].values() if folder.count("/") < 2]
    named = set(re.findall(r"`([\w/]+)`", section(read("docs/architecture.md"), "Packages")))
    assert sorted(set(folders) - named) == []


def test_module_names_in_the_architecture_exist_in_their_package() -> None:
    text = read("docs/architecture.md")
    llm = section(text, "The LLM engine's modules")
    for part, folder in ((llm, "engine/llm"), (text.replace(llm, ""), "engine/scheduler")):
        named = set(re.findall(r"`(\w+(?:/\w+)?\.py)`", part))
        found = [
            file for file in named if (ROOT / folder / file).is_file() or ("/" in file and (ROOT / file).is_file())
        ]
        assert len(named) > 20 and sorted(named - set(found)) == []


def test_no_term_of_the_glossary_appears_twice() -> None:
    cells = re.findall(r"^\| \*\*(.+?)\*\*(.*?) \|", read("docs/glossary.md"), re.MULTILINE)
    terms = [term for cell, _ in cells for term in cell.split(", ")]
    assert len(terms) > 50
    assert sorted({term for term in terms if terms.count(term) > 1}) == []
    assert [f"{term}{more}" for term, more in cells if more] == [], "a word that needs a qualifier has two meanings"


# states and rows


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("The states of a request", request.TRANSITIONS),
        ("The states of a worker", supervisor.TRANSITIONS),
        ("The states of a pipeline in a repository", repository.TRANSITIONS),
        ("The states of a sequence", sequence.MOVES),
    ],
)
def test_state_tables_are_those_of_the_code(heading: str, table: Mapping[tuple[str, str], str]) -> None:
    shown_rows = rows(section(read("docs/reference/states-and-messages.md"), heading))
    assert shown_rows == [(state, event, to) for (state, event), to in table.items()]


def test_every_message_is_documented() -> None:
    shown_rows = re.findall(r"`([A-Z]\w+)`", section(read("docs/reference/states-and-messages.md"), "The messages"))
    kinds = [kind.__name__ for kind in (*messages.ToWorker.__args__, *messages.FromWorker.__args__)]
    assert sorted({*shown_rows}) == sorted(kinds)


RELIABILITY = [f"{letter}{n}" for letter, last in (("R", 27), ("G", 3), ("S", 21)) for n in range(1, last + 1)]
STATES = ("holds", "partly", "not there")
CELL_CHARS_MAX = 200


def _reliability() -> list[tuple[str, ...]]:
    return [row for row in rows(read("docs/reliability.md")) if re.fullmatch(r"[RGS]\d+", row[0])]


def test_every_row_of_the_reliability_contract_has_a_state_and_one_link() -> None:
    found = _reliability()
    assert [row[0] for row in found] == RELIABILITY
    for number, _, state, short, link in found:
        assert state in STATES, number
        assert short.endswith(".") and not LINK.search(short), f"{number}: one sentence, the link is in the last cell"
        assert len(LINK.findall(link)) == 1, number


def test_no_cell_of_the_reliability_tables_is_long() -> None:
    cells = [cell for row in rows(read("docs/reliability.md")) for cell in row]
    assert [cell for cell in cells if len(cell) > CELL_CHARS_MAX] == []


@pytest.mark.parametrize("row", _reliability(), ids=lambda row: row[0])
def test_the_details_of_a_reliability_row_agree_and_name_tests(row: tuple[str, ...]) -> None:
    number, title, state, _, link = row
    path, _, anchor = LINK.findall(link)[0].partition("#")
    heading = f"{number} {title}"
    assert anchor == slug(heading)
    details = section(read(f"docs/{path}"), heading)
    assert f"State: **{state}**." in details
    assert state == "not there" or TEST.search(details), f"{number} names no test"
    assert state != "partly" or "Missing: " in details, f"{number} does not name what is missing"


def test_every_heading_of_the_reliability_pages_has_its_row() -> None:
    pages = [page for page in PAGES if page.startswith("docs/reliability/")]
    found = [heading.partition(" ")[0] for page in pages for heading in headings(read(page))[1:]]
    assert sorted(found) == sorted(RELIABILITY)
