"""What imports what: rooms import downwards only, pure files stay pure, and frameworks load when a node opens."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    **{"weftline.errors": 0, "weftline.fields": 0, "weftline.shm": 1, "weftline.nodes": 2, "weftline.node": 2},
    **{"weftline.pipelines": 3, "weftline.engine": 4},
}
FRONT_DOOR = 5

PURE = [
    *(f"shm/{name}.py" for name in ("spec", "block", "allocator", "lease")),
    *(f"nodes/{name}.py" for name in ("grouping", "out_of_memory", "loopback")),
    *(f"shm/device/{name}.py" for name in ("names", "driver", "events")),
    "weftline/testing/recorder.py",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "pipelines").rglob("*.py"))),
    *(
        path.relative_to(ROOT).as_posix()
        for room in ("scheduler",)
        for path in sorted((ROOT / "engine" / room).glob("*.py"))
    ),
    *(f"engine/bench/{name}.py" for name in ("outcome", "arrivals", "critical_path", "report", "trace")),
    *(
        f"engine/{name}.py"
        for name in (
            "flags",
            "protocol/messages",
            "protocol/figures",
            "runtime/arena_readers",
            "runtime/timer",
            "token_bucket",
        )
    ),
    *(f"engine/llm/{name}.py" for name in ("sequence", "kv_cache", "schedule")),
    *(f"engine/llm/vision/{name}.py" for name in ("families", "features", "positions", "prompt")),
    *(f"engine/serving/{name}.py" for name in ("auth/methods", "auth/token_entries", "openai/bodies", "statistics")),
    *(f"engine/serving/anthropic/{name}.py" for name in ("blocks", "bodies", "conversation", "errors", "tools")),
    "engine/serving/anthropic/responses.py",
    *(f"engine/serving/openai/responses_api/{name}.py" for name in ("answer", "body", "items", "output", "store")),
    *(f"engine/serving/v2/{name}.py" for name in ("messages", "datatypes", "elements")),
    "nodes/strict_json.py",
    *(f"engine/serving/v2/{name}.py" for name in ("request", "response", "parameters", "metadata")),
    *(f"engine/metrics/{name}.py" for name in ("series", "requests", "spans")),
    *(f"engine/jobs/{name}.py" for name in ("rows", "spec", "sources/formats")),
    *(f"engine/jobs/output/{name}.py" for name in ("layout", "manifest")),
    *(f"engine/jobs/runners/{name}.py" for name in ("plans",)),
    *(f"engine/jobs/report/{name}.py" for name in ("summary", "text")),
]
IMPURE = {"torch", "time", "datetime", "socket", "asyncio", "threading", "subprocess", "selectors", "select", "signal"}
FRAMEWORKS = (
    *("torch", "torchvision", "onnxruntime", "whisper", "ultralytics", "transformers", "PIL", "cv2"),
    *("grpc", "tritonclient", "starlette", "uvicorn", "opentelemetry", "prometheus_client"),
    *("pyarrow", "datasets", "fsspec", "webdataset", "matplotlib", "ray", "pandas", "cuda", "httpx2"),
    *("ctranslate2", "faster_whisper"),
)
MAY_LOAD = (
    "engine/llm/",  # of which only the pure files and node.py must load without one
    *("engine/serving/grpc/", "engine/serving/http/", "engine/serving/openai/", "engine/serving/v2/protobuf.py"),
    "engine/serving/anthropic/",
    *("engine/serving/server.py", "engine/serving/frontend/process.py", "engine/client/", "engine/metrics/"),
    *("engine/jobs/output/", "engine/jobs/sources/", "engine/jobs/ray/"),
    *("weftline/gpu_check/llm_engine.py", "weftline/gpu_check/llm_parts.py", "weftline/gpu_check/llm_served.py"),
)
"""Where frameworks may be imported at the top of a file: these are imported only to be used."""
LEAVES = (
    "weftline.engine.token_bucket",
    "weftline.engine.fair_queue",
    "weftline.engine.llm.params",
    "weftline.engine.llm.template_options",
)
"""Pure files that import nothing of the engine, for both sides."""
SHARED = ("weftline.engine.runtime.decode_process",)
"""Decoding processes, which both the engine and the llm step of a worker start for pictures."""
UNSAFE = {"pickle", "_pickle", "multiprocessing", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def package_files() -> list[str]:
    """Return every Python file of the package, relative to the root."""
    folders = ("shm", "nodes", "pipelines", "engine", "weftline/cli", "weftline/gpu_check", "weftline/testing")
    rooms = [path for room in folders for path in (ROOT / room).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in [*rooms, *(ROOT / "weftline").glob("*.py")])


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def imports_of(file: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything a file imports, inside functions and for type checkers too."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_of(file: str) -> str:
    stem = file.removesuffix(".py").removesuffix("/__init__")
    return stem.replace("/", ".") if file.startswith("weftline") else "weftline." + stem.replace("/", ".")


def floor_of(module: str) -> int:
    return FLOORS.get(".".join(module.split(".")[:2]), FRONT_DOOR)


@pytest.mark.slow
def test_rooms_import_downwards_only() -> None:
    wrong = [
        f"{file}:{line} imports {name}"
        for file in package_files()
        for line, name in imports_of(file)
        if name.partition(".")[0] == "weftline" and floor_of(name) > floor_of(module_of(file))
        if name != "weftline"  # `from weftline import errors` is judged by the imported name
    ]
    assert wrong == []


@pytest.mark.slow
def test_modules_do_not_import_the_package_itself() -> None:
    wrong = []
    for file in package_files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import) and floor_of(module_of(file)) < FRONT_DOOR:
                wrong += [f"{file}:{node.lineno}" for alias in node.names if alias.name == "weftline"]
    assert wrong == []


def test_only_weftline_testing_imports_weftline_testing() -> None:
    """The product opens fake nodes and fake drivers by their import paths, so that no process loads unused fakes."""
    wrong = [
        f"{file}:{line} imports {name}"
        for file in package_files()
        if not file.startswith("weftline/testing/") and "weftline.testing" in (ROOT / file).read_text()
        for line, name in imports_of(file)
        if name == "weftline.testing" or name.startswith("weftline.testing.")
    ]
    assert wrong == []


@pytest.mark.slow
def test_the_llm_stands_beside_the_engine_and_neither_imports_the_other() -> None:
    wrong = []
    for file in package_files():
        if file.startswith("weftline/gpu_check/"):
            continue  # it checks both
        inside = file.startswith("engine/llm/")
        for line, name in imports_of(file):
            to_llm = name.startswith("weftline.engine.llm") and not name.startswith(LEAVES)
            to_engine = floor_of(name) >= FLOORS["weftline.pipelines"] and name.startswith("weftline.") and not to_llm
            to_engine = to_engine and not name.startswith((*LEAVES, *SHARED))
            if (inside and to_engine) or (not inside and to_llm):
                wrong.append(f"{file}:{line} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("file", PURE)
def test_pure_files_import_neither_frameworks_nor_clocks_nor_sockets(file: str) -> None:
    wrong = [f"line {line}: {name}" for line, name in imports_of(file) if name.partition(".")[0] in IMPURE]
    assert wrong == []


def test_no_framework_is_imported_at_the_top_of_a_file_of_the_spine() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file in package_files()
        if not file.startswith(MAY_LOAD)
        for node in tree_of(file).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in FRAMEWORKS
    ]
    assert wrong == []


def test_nodes_and_pure_files_import_without_any_framework() -> None:
    nodes = [file for file in package_files() if file.startswith("nodes/")]
    catalog = ["weftline.engine.llm.node", "weftline.engine.llm.external.node"]
    modules = sorted({module_of(file) for file in [*PURE, *nodes]}) + catalog
    script = (
        f"import sys\nfor name in {FRAMEWORKS!r}:\n    sys.modules[name] = None\n"
        f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_importing_all_but_llm_servers_and_jobs_loads_no_framework() -> None:
    modules = [module_of(file) for file in package_files() if not file.startswith((*MAY_LOAD, "engine/jobs/"))]
    modules.remove("weftline.__main__")
    script = (
        f"import sys, importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"print(*[name for name in {FRAMEWORKS!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_a_worker_loads_nothing_of_ours_before_it_is_hardened() -> None:
    """Until then it does not notice the end of its parent, and loading takes long on a busy machine."""
    watched = ("weftline", "numpy", "msgspec", "logging")
    script = (
        "import sys, weftline.engine.worker.__main__\n"
        f"print(*[name for name in sys.modules if name.partition('.')[0] in {watched!r}])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    allowed = {
        "weftline",
        "weftline.errors",
        "weftline.engine",
        "weftline.engine.worker.hardening",
        "weftline.engine.worker",
        "weftline.engine.worker.__main__",
    }
    assert set(ended.stdout.split()) == allowed


WALL_CLOCK = {
    *("time.time", "time.time_ns", "time.localtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "date.today", "datetime.today"),
}
DISPLAYS_TIME = {"engine/serving/http/context.py", "engine/serving/request_record.py"}
"""Where the wall clock is read, for display: when an answer was made, when a traced request began."""


def test_only_times_for_display_depend_on_the_wall_clock() -> None:
    reads = set()
    words = [*WALL_CLOCK, "from time import", "from datetime import"]
    for file in package_files():
        if not any(word in (ROOT / file).read_text() for word in words):  # most files: parsing takes its time
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                reads |= {file} if f"{of}.{node.attr}" in WALL_CLOCK else set()
            elif isinstance(node, ast.ImportFrom):
                reads |= {file} if {f"{node.module}.{one.name}" for one in node.names} & WALL_CLOCK else set()
    assert reads == DISPLAYS_TIME


def test_no_module_imports_what_could_run_code_from_bytes() -> None:
    wrong = [
        f"{file}:{line} imports {name}"
        for file in package_files()
        for line, name in imports_of(file)
        if name.partition(".")[0] in UNSAFE
    ]
    assert wrong == []


def test_no_check_is_an_assert_statement() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file in package_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Assert)
    ]
    assert wrong == [], "asserts vanish under -O; raise an error with a message"


def test_nothing_is_evaluated_from_text() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file in package_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")
    ]
    assert wrong == []
