"""Error tree: every exception Weftline raises deliberately.

    WeftlineError
    |-- PipelineError          the file or builder describes something that cannot run (all problems at once)
    |-- InputError             a request's input is wrong, or too large
    |   `-- ContextOverflow    a text has more tokens than the model reads
    |-- UnknownModel           no model of that name and version is served
    |-- AccessDenied           a missing or invalid token, or one without this permission
    |-- ModelError             a node could not open its model
    |   `-- MissingPackage     the framework a node needs is not installed
    |-- StepError              a node failed on one item
    |-- WorkerDied             the step's process died during the request; it is being restarted
    |-- Unavailable            the server cannot be reached, or accepts no requests now; try again
    |-- LimitReached           a configured limit refused the work; try again later
    |   `-- StepUnavailable    a step's workers keep failing to start; a retry does not help
    |-- DeadlineExceeded       the request's time ran out
    |-- RequestCancelled       the caller cancelled the request
    |-- JobChanged             pipeline, data or settings of a resumed job differ from its first run
    |-- TooManyErrors          more rows of a job failed than its limit permits
    |-- OutputFailed           a job's results could not be written
    `-- SessionClosed          the session was closed, or never opened

Each class has the gRPC status of its response and the exit code of the command line. A message has the location, what
was found, what was expected, and the remedy. It never has a memory address, a traceback, or a path of the server that
the caller did not send.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a pipeline, with its location and its remedy.

    path:     location in the pipeline, such as `steps.see.batch.items_max`; empty for the whole file.
    found:    the value there, as a phrase that can follow `path: `.
    expected: valid values; empty when `found` is sufficient.
    fix:      remedy; empty for none.
    line:     1-based line in `file`, 0 when the pipeline was built in Python or the line is unknown.
    file:     the file as the user named it; empty for a pipeline built in Python.
    """

    path: str
    found: str
    expected: str = ""
    fix: str = ""
    line: int = 0
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}  " if self.file and self.line else f"{self.file}  " if self.file else ""
        head = f"{where}{self.path}: {self.found}" if self.path else f"{where}{self.found}"
        rest = [f"    expected: {self.expected}"] if self.expected else []
        rest += [f"    fix: {self.fix}"] if self.fix else []
        return "\n".join([head, *rest])


class WeftlineError(Exception):
    """Base class of all errors of Weftline.

    retry_after_s: earliest useful retry, in seconds; 0: unknown.
    timings: of a failed request, one StepTiming for each step that had run.
    """

    status: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1
    timings: tuple[Any, ...] = ()
    retry_after_s: float = 0.0


class PipelineError(WeftlineError):
    """A pipeline that cannot run; `problems` holds every one of them, in file order."""

    status = "INVALID_ARGUMENT"
    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.file, p.line)))
        super().__init__("\n".join([*map(str, self.problems), self._closing()]))

    def _closing(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        files = {p.file for p in self.problems if p.file}
        return f"{count} in {', '.join(sorted(files)) or 'the pipeline'}; nothing was started"


class InputError(WeftlineError):
    """A request's input is missing, unknown, of the wrong type, corrupt, or over a limit.

    param: name of the option or field at fault, such as `temperature`; '' for none.
    """

    status = "INVALID_ARGUMENT"
    exit_code = 3

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class ContextOverflow(InputError):
    """A prompt or text has more tokens than the model reads; a shorter one, or another model, can succeed."""


class UnknownModel(WeftlineError):
    """No model of that name and version is served; the message does not list others."""

    status = "NOT_FOUND"
    exit_code = 3


class AccessDenied(WeftlineError):
    """A missing or invalid token, or a token without this permission; the former has status UNAUTHENTICATED."""

    status = "PERMISSION_DENIED"
    exit_code = 9

    def __init__(self, message: str, *, known: bool = True) -> None:
        """known: the token is valid, but lacks the permission."""
        super().__init__(message)
        if not known:
            self.status = "UNAUTHENTICATED"  # type: ignore[misc]


class ModelError(WeftlineError):
    """A step's model could not be opened: missing, truncated, of another kind, or refused for safety."""

    status = "FAILED_PRECONDITION"
    exit_code = 4


class MissingPackage(ModelError):
    """A node's framework is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, step: str = "") -> None:
        where = f"step {step}: " if step else ""
        fix = f"pip install 'weftline[{extra}]', or in a checkout pip install '.[{extra}]'"
        super().__init__(f"{where}package {package} is not installed\n    fix: {fix}")


class StepError(WeftlineError):
    """A node failed on one item; the other items of its batch are not affected. `step` is its name."""

    exit_code = 5

    def __init__(self, message: str, step: str = "") -> None:
        super().__init__(f"step {step}: {message}" if step else message)
        self.step = step


KEEPS_FAILING_TO_START = "keeps failing to start"
"""Part of every message that says that a step has no worker left; jobs recognise such a WorkerDied by it."""


class WorkerDied(WeftlineError):
    """A step's process died during the request; it is being restarted."""

    status = "UNAVAILABLE"
    exit_code = 6


class Unavailable(WeftlineError):
    """The server cannot be reached, or accepts no requests now; try again."""

    status = "UNAVAILABLE"
    exit_code = 6


class LimitReached(WeftlineError):
    """A limit refused the work at once; the message names the limit. `retry_after_s` is the earliest useful retry."""

    status = "RESOURCE_EXHAUSTED"
    exit_code = 7

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StepUnavailable(LimitReached):
    """A step has no worker left: each failed to start too often. A retry does not help; reload the pipeline."""

    status = "UNAVAILABLE"


class DeadlineExceeded(WeftlineError):
    """The request's deadline passed before its outputs were ready."""

    status = "DEADLINE_EXCEEDED"
    exit_code = 8


class RequestCancelled(WeftlineError):
    """The caller cancelled the request."""

    status = "CANCELLED"
    exit_code = 130


class JobChanged(WeftlineError):
    """Pipeline, data or settings of a resumed job differ from its first run."""

    status = "FAILED_PRECONDITION"
    exit_code = 10


class TooManyErrors(WeftlineError):
    """More rows of a job failed than its limit permits; committed parts stay, and the job can be resumed.

    end: state of the job then, a JobResult.
    """

    end: Any = None

    status = "ABORTED"
    exit_code = 11


class OutputFailed(WeftlineError):
    """A job's results could not be written; committed parts stay complete, and the job can be resumed."""

    status = "UNAVAILABLE"
    exit_code = 12


class SessionClosed(WeftlineError):
    """The session is closed, or was never opened; open a new one."""

    status = "UNAVAILABLE"
    exit_code = 1


class RemoteTraceback(Exception):
    """The traceback of an exception that a step's code raised in a worker process, as the `__cause__` of an error.

    It is never raised itself. Python prints it above the error, as it does for concurrent.futures. Its first frame is
    the step's code. It names files of this machine, so it is for callers in this process and for logs alone.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}\n"""'


def traceback_of(error: BaseException) -> str:
    """Return the traceback of the step's code that an error was caused by; '' when there is none."""
    seen = 0
    cause: BaseException | None = error
    while cause is not None and seen < CAUSES_MAX:
        if isinstance(cause, RemoteTraceback):
            return cause.text
        cause, seen = cause.__cause__, seen + 1
    return ""


CAUSES_MAX = 8
"""Most links of a chain of causes that `traceback_of` follows."""

BY_NAME: dict[str, type[WeftlineError]] = {
    cls.__name__: cls
    for cls in (
        *(InputError, ContextOverflow, ModelError, StepError, WorkerDied),
        *(Unavailable, LimitReached, StepUnavailable, DeadlineExceeded, RequestCancelled),
    )
}
"""The errors that may cross from a worker to the runtime, by the name they travel under."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank; its class name when there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
