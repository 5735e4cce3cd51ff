"""Local backend: models are sessions of a `Repository` in this process.

    with Repository() as repository:
        backend = LocalBackend(repository, config.pipelines)
        await backend.open()                       # every pipeline that is to be loaded
        answer = await backend.ask(Ask("ocr", {"photo": png}))

An exposed step is a pipeline of that step alone, over what its pipeline has loaded. A pipeline that cannot be loaded
leaves the others serving. An admin receives the reason of a failed load; other clients receive that the model is not
ready. The log has the reason too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from weftline.engine.repository import Repository
from weftline.engine.request import DEFAULT_OPTIONS, RequestOptions
from weftline.engine.result import BorrowedResult, StreamedOutput
from weftline.engine.runtime.opening import Progress
from weftline.engine.serving.backend import Answer, Ask, Done, Observer, Record
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.exposed_models import model_names, models_with_errors
from weftline.engine.serving.model_info import (
    LOADING,
    NOT_LOADED,
    READY,
    UNAVAILABLE,
    ModelInfo,
    ModelState,
    model_info,
)
from weftline.engine.serving.request_record import Begin, RequestRecord
from weftline.engine.session import Session
from weftline.errors import (
    InputError,
    ModelError,
    PipelineError,
    SessionClosed,
    UnknownModel,
    WeftlineError,
    traceback_of,
)
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.single_step import Models, models_of

_log = logging.getLogger("weftline.ingress")

_STATES = {"loading": LOADING, "ready": READY, "reloading": READY}
"""A repository's states as clients see them; the others are UNAVAILABLE."""


class LocalBackend:
    """Models of this process. Used from one event loop.

    served:    what may be loaded, by name.
    observers: called for every request that ended.
    begin:     gives a request its trace context.
    metrics:   renders all figures.
    progress:  as for `Session.open`, with `model.step` for steps; not called after `open`.
    strict:    load all models at the start, or none.
    """

    def __init__(
        self,
        repository: Repository,
        served: Mapping[str, ServedPipeline],
        *,
        observers: Sequence[Observer] = (),
        begin: Begin | None = None,
        metrics: Callable[[], bytes] | None = None,
        progress: Progress | None = None,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self._repository = repository
        self._served = dict(served)
        self._observers = tuple(observers)
        self._begin = begin
        self._metrics = metrics
        self._progress = progress
        self._infos: dict[str, tuple[Session, ModelInfo]] = {}
        self._failed: dict[str, str] = {}  # why a model that the repository does not have could not be loaded
        self._models: Models = frozenset()  # of exposed steps
        self._turns = {name: asyncio.Lock() for name in self._served}
        self._known = {model for name, one in self._served.items() for model in model_names(name, one)}

    # models

    def index(self) -> tuple[ModelState, ...]:
        found = {
            entry.name: ModelState(
                entry.name,
                entry.version,
                UNAVAILABLE if entry.state in ("ready", "reloading") and not entry.ready else _state(entry.state),
                entry.why or self._failed.get(entry.name, ""),
            )
            for entry in self._repository.index()
        }
        absent = {name: ModelState(name, 0, UNAVAILABLE, self._failed.get(name, NOT_LOADED)) for name in self._known}
        return tuple(state for _, state in sorted((absent | found).items()))

    def info(self, model: str, version: str = "") -> ModelInfo:
        session = self._session(model)
        held = self._infos.get(model)
        if held is None or held[0] is not session or held[1].version != session.version:
            held = session, model_info(model, session.version, session.plan)
            self._infos[model] = held
        info = held[1]
        if version and version != str(info.version):
            raise UnknownModel(f"model {model} has no version {version!r:.40}; version {info.version} serves")
        return info

    def sessions(self) -> dict[str, Session]:
        """Return the sessions that serve now, by model."""
        serving = {}
        for entry in self._repository.index():
            try:
                serving[entry.name] = self._repository.get(entry.name)
            except WeftlineError:
                continue  # it ended this very moment
        return serving

    def stats(self, model: str) -> Mapping[str, Any]:
        try:
            return self._session(model).stats()
        except (SessionClosed, UnknownModel):
            return {}

    async def metrics(self) -> bytes:
        return await asyncio.to_thread(self._metrics) if self._metrics is not None else b""

    # life

    async def open(self) -> None:
        """Load every pipeline that is to be loaded at the start, together.

        One that cannot be read, planned or opened leaves the others serving, without its exposed steps: the log and the
        index have the reason. WeftlineError: all of them failed; with `strict`, the first that did.
        """
        async with AsyncExitStack() as turns:
            wanted = {name: one for name, one in self._served.items() if one.load}
            for name in wanted:
                await turns.enter_async_context(self._turns[name])
            models: dict[str, Pipeline] = {}
            failed: dict[str, WeftlineError] = {}
            graphs: dict[str, Pipeline] = {}
            for name, one in wanted.items():
                try:
                    graphs[name] = await asyncio.to_thread(self._read, one)
                except WeftlineError as error:
                    failed[name] = error
            for name, graph in graphs.items():
                try:
                    models |= await asyncio.to_thread(_pipelines, name, wanted[name], graph, self._models)
                except WeftlineError as error:
                    failed[name] = error
            if failed and self._strict:
                raise _with_name(*next(iter(failed.items())), self._served)
            done = await self._load_together(models, first_error=self._strict)
            self._progress = None
            failed |= {name: why for name, why in done.items() if name in wanted and isinstance(why, WeftlineError)}
            if failed and not any(isinstance(one, int) for one in done.values()):
                raise _all_of([_with_name(name, why, self._served) for name, why in failed.items()])
            for model, outcome in {**done, **failed}.items():
                if isinstance(outcome, WeftlineError):
                    _log_failure(model, outcome)
                else:
                    _log.info("model %s: version %d serves", model, outcome)
            for name, why in failed.items():
                await self._fail(name, wanted[name], why, done)

    async def _fail(
        self, name: str, one: ServedPipeline, error: WeftlineError, done: Mapping[str, int | WeftlineError]
    ) -> None:
        """Fail a pipeline at the start, and its exposed steps."""
        self._failed |= {name: str(error)} | dict.fromkeys(
            model_names(name, one)[1:], f"{name} could not be loaded: {error}"
        )
        for model in model_names(name, one):
            if isinstance(done.get(model), int):
                await asyncio.to_thread(self._repository.unload, model)

    async def load(self, model: str) -> int:
        """As in `Backend`; continues when the caller stops waiting.

        ModelError when it fails: a broken file is not the caller's mistake.
        """
        return await asyncio.shield(asyncio.ensure_future(self._load_for_admin(model, self._served_pipeline(model))))

    async def _load_for_admin(self, model: str, one: ServedPipeline) -> int:
        try:
            return await self._load(model, one)
        except (InputError, PipelineError) as error:
            _log_failure(model, error)
            raise ModelError(f"model {model} could not be loaded: {error}") from None
        except WeftlineError as error:
            _log_failure(model, error)
            raise

    def should_serve(self, model: str) -> bool:
        """Return whether a pipeline was to be loaded, at the start or by an admin, and was not unloaded since."""
        return model in self._failed or any(entry.name == model for entry in self._repository.index())

    async def unload(self, model: str) -> None:
        """As in `Backend`; goes on as `load` does."""
        await asyncio.shield(asyncio.ensure_future(self._unload(model, self._served_pipeline(model))))

    async def _unload(self, model: str, one: ServedPipeline) -> None:
        async with self._turns[model]:
            for name in model_names(model, one):
                self._failed.pop(name, None)
            loaded = {entry.name for entry in self._repository.index()}
            for name in reversed(model_names(model, one)):
                if name in loaded:
                    await asyncio.to_thread(self._repository.unload, name)
                    self._infos.pop(name, None)

    def _read(self, one: ServedPipeline) -> Pipeline:
        """Read a pipeline as it is in its file now, and note the models of its exposed steps."""
        graph = load_file(one.file)
        self._models |= models_of(graph, one.expose)
        return graph

    def _served_pipeline(self, model: str) -> ServedPipeline:
        one = self._served.get(model)
        if one is None:
            raise UnknownModel(f"model {model:.128} is not configured on this server")
        return one

    async def _load(self, model: str, one: ServedPipeline) -> int:
        async with self._turns[model]:  # a pipeline and its exposed steps change together
            try:
                graph = await asyncio.to_thread(self._read, one)
                models = await asyncio.to_thread(_pipelines, model, one, graph, self._models)
            except WeftlineError as error:
                self._failed[model] = str(error)
                raise
            for name in models:
                self._failed.pop(name, None)
            before, began_s = self._running(models), time.monotonic()
            await self._load_together(models, at_once=True)
            version = self._repository.get(model).version
            loaded = len(self._running(models) - before)
            what = "1 step" if loaded == 1 else f"{loaded} steps"
            how = f"{what} loaded in {time.monotonic() - began_s:.1f} s" if loaded else "no model loaded"
            _log.info("%s: version %d serves (%s)", model, version, how)
            return version

    def _running(self, models: Collection[str]) -> set[tuple[str, int]]:
        """Return the steps of models that workers have loaded: the deployment, and the pid of each of its workers."""
        found = set[tuple[str, int]]()
        for name, session in self.sessions().items():
            if name in models:
                found |= session.loaded_nodes()
        return found

    async def _load_together(
        self, models: Mapping[str, Pipeline], *, first_error: bool = False, at_once: bool = False
    ) -> dict[str, int | WeftlineError]:
        """Load or reload models; return the version or the error of each.

        first_error: raise it, and load no more.
        at_once:     change to all of them in the same moment; or, after an error, which is raised, to none.
        """

        def load() -> dict[str, int | WeftlineError]:
            done = dict[str, int | WeftlineError]()
            for name, version in self._repository.load_together(models, progress=self._progress_of, strict=at_once):
                if isinstance(version, WeftlineError) and first_error:
                    raise _with_name(name, version, self._served)
                done[name] = version
            return done

        return await asyncio.to_thread(load)

    def _progress_of(self, name: str) -> Progress | None:
        tell = self._progress
        return None if tell is None else lambda step, phrase, share: tell(f"{name}.{step}", phrase, share)

    # requests

    def _options_of(self, ask: Ask) -> RequestOptions:
        """Return the engine's options of a request; all outputs are those that clients see."""
        outputs = ask.outputs
        if outputs is None and (info := self.info(ask.model)).usage:
            outputs = tuple(port.name for port in info.outputs)
        return _options(ask, outputs)

    async def ask(self, ask: Ask) -> Answer:
        noted = RequestRecord(ask, self._begin)
        version = 0
        try:
            session = self._session(ask.model)
            version = session.version
            if ask.version:
                self.info(ask.model, ask.version)
            borrowed = await session.borrow(ask.inputs, self._options_of(ask), paths=False, caller=ask.caller)
        except BaseException as error:
            self._notify(noted.failed(error, version))
            raise
        return self._answer(noted, borrowed)

    def try_submit(self, ask: Ask, done: Done) -> Callable[[], None] | None:
        noted = RequestRecord(ask, self._begin)
        version = 0

        def ended(result: BorrowedResult | BaseException) -> None:
            if isinstance(result, BorrowedResult):
                done(self._answer(noted, result))
            else:
                self._notify(noted.failed(result, version))
                done(result)

        try:
            session = self._session(ask.model)
            version = session.version
            if ask.version:
                self.info(ask.model, ask.version)
            cancel = session.try_submit(ask.inputs, self._options_of(ask), ended, paths=False, caller=ask.caller)
        except BaseException as error:
            self._notify(noted.failed(error, version))
            raise
        if cancel is None:
            return None

        def cancel_and_notify() -> None:
            if cancel():
                self._notify(noted.failed(asyncio.CancelledError(), version))

        return cancel_and_notify

    def _answer(self, noted: RequestRecord, borrowed: BorrowedResult) -> Answer:
        if self._observers:
            self._notify(noted.answered(borrowed))
        return Answer(
            borrowed.outputs,
            borrowed.timings,
            borrowed.total_ms,
            borrowed.version,
            noted.traceparent,
            borrowed.release,
            known_bytes=borrowed.size_bytes,
        )

    async def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        noted = RequestRecord(ask, self._begin)
        version = 0
        try:
            session = self._session(ask.model)
            version = session.version
            if ask.version:
                self.info(ask.model, ask.version)
            options = self._options_of(ask)
            pieces = session.stream_outputs(
                ask.inputs, options, paths=False, caller=ask.caller, timed=noted.set_timings
            )
            try:
                async for piece in pieces:
                    noted.add_chunk(piece)
                    yield piece
            finally:
                await pieces.aclose()
        except BaseException as error:
            self._notify(noted.failed(error, version))
            raise
        self._notify(noted.ended(version))

    def _session(self, model: str) -> Session:
        try:
            return self._repository.get(model)
        except InputError:
            if model in self._known:
                raise SessionClosed(f"model {model} is not loaded") from None
            raise UnknownModel(f"Request for unknown model: no model is called {model!r:.140}") from None
        except SessionClosed as error:
            _log.debug("model %s cannot be asked: %s", model, error)
            raise SessionClosed(f"model {model} is not ready") from None

    def _notify(self, record: Record) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:
                _log.exception("an observer of requests failed")


def _options(ask: Ask, outputs: Sequence[str] | None) -> RequestOptions:
    """Return the engine's options of a request; InputError for an invalid one."""
    unset = outputs is None and ask.deadline_ms is None and ask.seed is None and ask.sequence is None
    if unset and not (ask.priority or ask.job):
        return DEFAULT_OPTIONS
    return RequestOptions(
        outputs=outputs,
        deadline_ms=ask.deadline_ms,
        priority=ask.priority,
        sequence=_own(ask),
        job=ask.job,
        seed=ask.seed,
    )


def _own(ask: Ask) -> SequencePart | None:
    """Return a request's sequence as the engine knows it: callers count from 1, and do not meet in each other's."""
    part = ask.sequence
    return part if part is None or not ask.caller else SequencePart(f"{ask.caller}/{part.id}", part.start, part.end)


def _pipelines(name: str, served: ServedPipeline, pipeline: Pipeline, models: Models) -> dict[str, Pipeline]:
    """Return the models of a pipeline, as `models_with_errors`; the first error is raised."""
    found, errors = models_with_errors(name, served, pipeline, models)
    for error in errors.values():
        raise error
    return found


def _with_name(name: str, error: WeftlineError, models: Collection[str]) -> WeftlineError:
    """Return the error of one of several models with its name; errors of files have those of the files."""
    if len(models) < 2 or isinstance(error, PipelineError):
        return error
    named = ModelError(f"model {name}: {error}")
    named.__cause__ = error
    return named


def _all_of(errors: Sequence[WeftlineError]) -> WeftlineError:
    """Return one error for several: with all problems where these are of files."""
    problems = [problem for one in errors if isinstance(one, PipelineError) for problem in one.problems]
    others = [one for one in errors if not isinstance(one, PipelineError)]
    if not others:
        return PipelineError(problems)
    return others[0] if len(errors) == 1 else ModelError("\n".join(str(one) for one in errors))


def _log_failure(model: str, error: WeftlineError) -> None:
    """Log why a model could not be loaded: a line for each problem of its files."""
    for one in error.problems if isinstance(error, PipelineError) else (error,):
        why = ", ".join(line.strip() for line in str(one).splitlines())
        _log.error("model %s could not be loaded: %s", model, why, extra={"traceback": traceback_of(error)})


def _state(state: str) -> str:
    return _STATES.get(state, UNAVAILABLE)
