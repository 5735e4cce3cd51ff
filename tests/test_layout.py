"""The layout: one list of packages, and folders, links and builds that agree with it."""

import importlib
import tomllib
from pathlib import Path

from weftline.nodes.catalog import CATALOG, resolve

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
ROOMS = ("shm", "nodes", "pipelines", "engine")
OWN = ("weftline/cli", "weftline/gpu_check", "weftline/testing")
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def folder_of(package: str) -> str:
    """Return the folder of a package: links lead to the top level, other subpackages lie in weftline/."""
    linked = package.removeprefix("weftline.").partition(".")[0] in ROOMS
    return package.removeprefix("weftline." if linked else "").replace(".", "/")


def folders_with_code() -> set[str]:
    """Return every folder of the product that holds Python files."""
    folders = [ROOT / folder for folder in (*ROOMS, *OWN)]
    files = [path for folder in folders for path in folder.rglob("*.py")] + list((ROOT / "weftline").glob("*.py"))
    return {path.parent.relative_to(ROOT).as_posix() for path in files}


def test_the_package_list_and_the_package_dir_map_are_the_same() -> None:
    assert SETUPTOOLS["package-dir"] == {package: folder_of(package) for package in SETUPTOOLS["packages"]}


def test_every_folder_with_code_is_a_package_of_the_list() -> None:
    assert folders_with_code() == set(SETUPTOOLS["package-dir"].values())
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders_with_code())


def test_the_links_inside_the_package_are_its_modules_and_relative() -> None:
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "weftline").iterdir() if path.is_symlink()}
    assert links == {room: f"../{room}" for room in ROOMS}
    listed = {package.split(".")[1] for package in SETUPTOOLS["packages"] if "." in package}
    assert set(links) | {folder.removeprefix("weftline/") for folder in OWN} == listed


def test_the_import_names_lead_to_the_rooms() -> None:
    for package in SETUPTOOLS["packages"]:
        found = importlib.import_module(package).__file__
        assert found is not None
        assert Path(found).resolve() == ROOT / folder_of(package) / "__init__.py"


def test_checkers_see_every_file_once() -> None:
    rooms = sorted(ROOMS)
    assert sorted(PROJECT["tool"]["ruff"]["extend-exclude"]) == [f"weftline/{room}" for room in rooms]
    assert sorted(PROJECT["tool"]["mypy"]["exclude"]) == [f"^{room}/" for room in rooms]


def test_the_command_leads_to_the_command_line() -> None:
    module, _, name = PROJECT["project"]["scripts"]["weftline"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_every_extra_that_a_node_asks_for_can_be_installed() -> None:
    known = set(PROJECT["project"]["optional-dependencies"])
    asked = {name: resolve(name, ROOT).extra for name in CATALOG}
    assert {name: extra for name, extra in asked.items() if extra and extra not in known} == {}


def test_type_hints_are_shipped() -> None:
    assert SETUPTOOLS["package-data"]["weftline"] == ["py.typed"]
    assert (ROOT / "weftline" / "py.typed").is_file()


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {path.stem for folder in folders_with_code() for path in (ROOT / folder).glob("*.py")}
    assert not names & VAGUE
