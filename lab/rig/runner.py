"""Runs scenarios on a boot: starts the engines, sends what each scenario says, and judges what must hold."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.rig import cache, client, deployment, engine, environment, models, ports, trees
from lab.rig import tree as engine_tree
from lab.rig.boot import Boot, Part
from lab.rig.errors import RigError
from lab.rig.measure import MEASURES, NothingToMeasure, Result, rows
from lab.rig.member import FATAL
from lab.rig.scenario import Drain, Refusal, Scenario, Send, Turn
from lab.rig.tree import RELEASES, Tree

# Seconds that a line may take from an engine to its log on a machine that others keep busy.
KEEPER_LAG = 20.0
Trees = Mapping[tuple[str, str], Tree]
Results = Mapping[str, Result]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """One line of the table: what must hold, what was measured, whether it holds."""

    scenario: str
    hold: str
    measured: float | None
    holds: bool
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "scenario": self.scenario,
            "hold": self.hold,
            "measured": self.measured,
            "holds": self.holds,
            "note": self.note,
        }


@dataclass
class Report:
    """What one boot brought.

    Attributes:
        lines: one for each thing that must hold.
        answers: for each scenario and send the answers, for ``--json``.
        rows: for each scenario one row a request, see ``measure.rows``.
        start_s, run_s: seconds until everything was ready, and for the scenarios after that.
        memory: largest proportional set size seen, in bytes.
        folder: where the logs are.
    """

    boot: str
    lines: list[Line] = field(default_factory=list)
    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    run_s: float = 0.0
    memory: int = 0
    folder: Path = Path()

    @property
    def green(self) -> bool:
        """Whether every line holds and there is at least one."""
        return bool(self.lines) and all(line.holds for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "boot": self.boot,
            "green": self.green,
            "start_s": round(self.start_s, 1),
            "run_s": round(self.run_s, 1),
            "ready_s": self.ready_s,
            "memory_mib": self.memory >> 20,
            "logs": str(self.folder / "logs"),
            "lines": [line.as_json() for line in self.lines],
            "requests": self.rows,
            "answers": self.answers,
        }


@dataclass
class Running:
    """A boot whose engines run."""

    boot: Boot
    deployment: deployment.Deployment
    engines: dict[str, engine.Engine]
    router_ports: dict[str, int]

    def route(self, send: Send) -> tuple[client.Route, str, str]:
        """Where a send goes, and the names of the engines whose lines are read.

        Raises:
            RigError: kind ``scenario``; it names something that the boot does not have.
        """
        for name in send.to:
            if name not in self.engines and name not in self.router_ports:
                raise RigError("scenario", f"boot {self.boot.name} has no {name!r}")
        if len(send.to) == 2:
            prefill, decode = (self.engines[name] for name in send.to)
            return client.Route(decode.port, prefill.port, prefill.bootstrap), prefill.name, decode.name
        (name,) = send.to
        if name in self.router_ports:
            router = next(router for router in self.boot.routers if router.name == name)
            # With one engine on each side it is known which of them served.
            prefill_name = router.prefill[0] if len(router.prefill) == 1 else ""
            decode_name = router.decode[0] if len(router.decode) == 1 else ""
            return client.Route(self.router_ports[name]), prefill_name, decode_name
        return client.Route(self.engines[name].port), name, name

    def lines(self, names: set[str]) -> dict[str, list[tuple[str, Mapping[str, str]]]]:
        """The observer's lines of some engines since the last mark."""
        return {name: [(event.name, event.values) for event in self.deployment.events(name)] for name in sorted(names)}


def make_engine(part: Part, trees: Trees, pythons: Mapping[str, Path], port: int, bootstrap: int) -> engine.Engine:
    """Fill in what the boot's file leaves open: the tree, the interpreter, the model's folder and the ports."""
    tree = trees[part.role, part.tree]
    # A tree of this run alone keeps its bytecode beside it, and both go when the run ends.
    own = {"PYTHONPYCACHEPREFIX": str(tree.root.parent / "bytecode")} if part.tree == "own" else {}
    return engine.Engine(
        name=part.name,
        role=part.role,
        mode=part.mode,
        tree=tree,
        python=pythons[part.role],
        model=models.ensure(part.model, cache.ensure),
        port=port,
        bootstrap=bootstrap,
        flags=part.flags,
        env={**own, **part.env, **part.gates},
        tp=part.tp,
        dtype=part.dtype,
        tokens=part.tokens,
    )


def need(boot: Boot, only: set[str] | None = None) -> None:
    """Refuse a boot that this machine cannot hold, or whose models are damaged. Starts nothing.

    Args:
        only: names of the members that are needed; all when ``None``.

    Raises:
        RigError: kinds ``memory``, ``disk``, ``model``.
    """
    parts = [part for part in boot.parts if only is None or part.name in only]
    routers = [router for router in boot.routers if only is None or router.name in only]
    if boot.memory and len(parts) == len(boot.parts) and len(routers) == len(boot.routers):
        available = deployment.available_memory()
        if available < boot.memory << 20:
            told = f"boot {boot.name} takes {boot.memory} MiB of memory, {available >> 20} MiB are free"
            raise RigError("memory", told)
    else:
        # A router with what it holds of its engines takes half of one.
        deployment.need_memory(len(parts) + len(routers), sum(part.tp for part in parts))
    cache.need_disk(deployment.runs_folder(), deployment.DISK, "a run")
    for model in sorted({part.model for part in parts}):
        models.ensure(model, cache.ensure)


def need_builds(boot: Boot, only: set[str], router: str, say: Say = lambda text: None) -> None:
    """Build the routers that a boot names, if they are not in the cache: now, and not in the middle of a list.

    Raises:
        RigError: kind ``router``; one cannot be built.
    """
    for build in sorted({one.build or router for one in boot.routers if one.name in only} & {"stock", "patched"}):
        say(f"router {build}: in the cache, or built now")
        engine.router_package(build, Path(), Path())


def start(
    boot: Boot,
    trees: Trees,
    router: str = "wheel",
    tied: bool = True,
    say: Say = lambda text: None,
    only: set[str] | None = None,
    extra_env: Mapping[str, Mapping[str, str]] | None = None,
    ports_for: Mapping[str, int] | None = None,
    limit: float = 600.0,
) -> Running:
    """Start a boot and wait until all of it is ready.

    Args:
        router: which router, see ``engine.router_package``.
        only: names of the members that are needed; all when ``None``.
        extra_env: for single engines, variables beyond those of the boot's file (planted faults).
        ports_for: ports to use instead of free ones, by the name of the member.

    Raises:
        RigError: kinds ``memory``, ``port``, ``environment``, ``crash`` and others.
    """
    need(boot, only)
    parts = [part for part in boot.parts if only is None or part.name in only]
    routers = [part for part in boot.routers if only is None or part.name in only]
    refusers = [part for part in boot.refusers if only is None or part.name in only]
    roles = {part.role for part in parts} | ({"decode"} if routers else set())
    pythons = {role: environment.ensure(RELEASES[role], say) for role in sorted(roles)}
    for port in (ports_for or {}).values():
        ports.need_free(port)
    chosen = ports.free(2 * len(parts) + 2 * len(routers) + len(refusers))
    for place, name in enumerate([part.name for part in parts] + [part.name for part in routers]):
        if ports_for and name in ports_for:
            chosen[2 * place] = ports_for[name]
    folder = deployment.new_folder(boot.name)
    engines: dict[str, engine.Engine] = {}
    specs = []
    for index, part in enumerate(parts):
        made = make_engine(part, trees, pythons, chosen[2 * index], chosen[2 * index + 1])
        if extra_env and part.name in extra_env:
            made = engine.Engine(**{**vars(made), "env": {**made.env, **extra_env[part.name]}})
        engines[part.name] = made
        specs.append(engine.engine_spec(made, folder))
    behind = dict(engines)
    for refuser, port in zip(refusers, chosen[2 * (len(parts) + len(routers)) :], strict=True):
        # The router sees the engine at another port.
        behind[refuser.name] = replace(engines[refuser.of], name=refuser.name, port=port)
        specs.append(engine.refuser_spec(refuser.name, port, engines[refuser.of], refuser.status, refuser.seconds))
    router_ports: dict[str, int] = {}
    for index, part_router in enumerate(routers):
        port, metrics = chosen[2 * (len(parts) + index)], chosen[2 * (len(parts) + index) + 1]
        router_ports[part_router.name] = port
        specs.append(
            engine.router_spec(
                part_router.name,
                pythons["decode"],
                port,
                metrics,
                [behind[name] for name in part_router.prefill],
                [behind[name] for name in part_router.decode],
                engine.router_package(part_router.build or router, folder, pythons["decode"]),
                part_router.flags,
                part_router.env,
            )
        )
    running = deployment.Deployment(folder, specs, tied=tied, say=say)
    try:
        running.up(limit)
    except BaseException:
        running.down()
        raise
    return Running(boot, running, engines, router_ports)


def wanted(boot: Boot, scenarios: Sequence[Scenario]) -> set[str]:
    """``needed``, and the engines that are started by themselves."""
    return needed(boot, scenarios).union(*(scenario.refused for scenario in scenarios))


def needed(boot: Boot, scenarios: Sequence[Scenario]) -> set[str]:
    """Members that the scenarios use, with the engines behind the routers among them."""
    names = {name for scenario in scenarios for name in scenario.engines}
    for router in boot.routers:
        if router.name in names:
            names |= {*router.prefill, *router.decode}
    return names | {refuser.of for refuser in boot.refusers if refuser.name in names}


class _Killer:
    """Kills the member that a send names, once, at the moment that it names."""

    def __init__(self, running: deployment.Deployment, send: Send) -> None:
        self.running, self.send = running, send
        self.lock = threading.Lock()
        self.done = threading.Event()
        if send.says:
            running.expect(send.kill)
        if send.says or isinstance(send.at, str):
            threading.Thread(target=self._watch, daemon=True).start()

    def heard(self, tokens: int) -> None:
        """A request has brought so many tokens."""
        if isinstance(self.send.at, int) and not self.send.says and tokens >= self.send.at:
            self.kill()

    def kill(self) -> None:
        """Kill, unless that was done before."""
        with self.lock:
            if not self.done.is_set():
                self.running.kill(self.send.kill)
                self.done.set()

    def _watch(self) -> None:
        while not self.done.is_set():
            if self._has_said():
                self.kill()
            time.sleep(0.05)  # the member's log is a file: it is read again until it says so

    def _has_said(self) -> bool:
        name = self.send.kill
        if not self.send.says:
            return any(found.name == self.send.at for found in self.running.events(name))
        log = self.running.new_log(name)
        # Left alone an engine waits a minute for core dumps, and its clients with it.
        return self.send.says in log and any(marker in log for marker in FATAL)


def _heard(tokens: int) -> None:
    """Nobody wants to know; but who listens reads a stream."""


def do_send(running: Running, send: Send) -> Result:
    """Send the requests of one step and gather the answers and the engines' lines.

    Raises:
        RigError: kind ``crash``; a member was lost meanwhile that the step does not kill itself.
    """
    route, prefill, decode = running.route(send)
    for name in send.flush:
        try:
            client.flush(running.engines[name].port)
        except OSError as error:
            raise RigError("flush", f"{name} would not empty its cache: {error}") from error
    prompts = client.prompts(send.seed, send.count, send.length, send.vary, send.prefix)
    group = f"{send.name}-{time.monotonic_ns()}"
    requests = [
        client.Request(
            prompt,
            send.new,
            str(index),
            f"{group}.{index:02d}of{send.count:02d}" if send.gathered else "",
            send.leave,
        )
        for index, prompt in enumerate(prompts)
    ]
    running.deployment.mark()
    killer = _Killer(running.deployment, send) if send.kill else None
    began = time.monotonic()
    try:
        answers = client.send_all(
            route,
            requests,
            send.together or send.gathered,
            send.timeout,
            killer.heard if killer is not None and isinstance(send.at, int) else _heard if send.stream else None,
            send.gathered,
        )
    finally:
        if killer is not None and not killer.done.is_set():
            killer.done.set()
            raise RigError("scenario", f"{send.kill} was not killed: nothing came at which it was to be")
    lost = any(answer.error for answer in answers) and not send.fails
    running.deployment.check(wait=5.0 if lost else 0.0)
    return Result(
        tuple(answers),
        running.lines({prefill, decode} - {""}),
        prefill,
        decode,
        time.monotonic() - began,
        tuple(len(prompt) for prompt in prompts),
        says="" if send.kill else send.says,
    )


def _told(running: Running, engines: Sequence[str]) -> bool:
    """Whether every engine's log says what it held when it was asked."""
    return all(any(event.name == "pools" for event in running.deployment.events(name)) for name in engines)


def do_drain(running: Running, drain: Drain) -> Result:
    """Wait until the engines of a step are idle, and read what they still hold.

    Raises:
        RigError: kind ``crash``; a member was lost meanwhile.
    """
    running.deployment.mark()
    began = time.monotonic()
    refused = ""
    for name in drain.engines:
        try:
            client.flush(running.engines[name].port, drain.within)
        except OSError as error:
            refused = refused or f"{name} is not idle after {drain.within:.0f} s ({error})"
    seconds = time.monotonic() - began
    running.deployment.check(wait=5.0 if refused else 0.0)
    late = time.monotonic() + KEEPER_LAG
    while not refused and time.monotonic() < late and not _told(running, drain.engines):
        time.sleep(0.05)  # what an engine printed is in its log once the keeper's turn came
    return Result((), running.lines(set(drain.engines)), seconds=seconds, refused=refused)


def do_refusal(boot: Boot, refusal: Refusal, trees_of: Trees, say: Say = lambda text: None) -> Result:
    """Start one engine by itself; it must end with the words that the step names.

    Raises:
        RigError: anything that is refused before it starts, and an end without these words.
    """
    try:
        running = start(boot, trees_of, say=say, only={refusal.engine})
    except RigError as error:
        if error.kind != "crash" or not any(refusal.says in line for line in error.tail):
            raise
        return Result((), refused=str(error))
    running.deployment.down()
    return Result(())


def chat(port: int, text: str, new: int) -> str:
    """Ask through the chat interface, so that the model's template and tokenizer run; return the text.

    Raises:
        RigError: kind ``request``; there is no answer.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": new,
        "ignore_eos": True,
    }
    try:
        answer = client.post(port, "/v1/chat/completions", body, 120.0)
        content: str = answer["choices"][0]["message"]["content"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise RigError("request", f"no chat answer: {error}") from error
    return content


def judge(scenario: Scenario, results: Mapping[str, Result]) -> list[Line]:
    """One line for each thing that must hold."""
    lines = []
    for hold in scenario.holds:
        try:
            value = MEASURES[hold.measure].of(results, hold.arguments)
        except (NothingToMeasure, KeyError, ValueError) as error:
            lines.append(Line(scenario.name, hold.text, None, False, str(error)))
            continue
        lines.append(Line(scenario.name, hold.text, value, hold.compare(value)))
    return lines


def run_steps(
    running: Running,
    scenario: Scenario,
    turn: Callable[[Turn], Running],
    refusal: Callable[[Refusal], Result],
    say: Say,
) -> tuple[Running, Results]:
    """Run the steps of one scenario; return the deployment that then runs, and what each named step brought.

    Args:
        turn: ends the deployment, turns its trees, and starts it again.
        refusal: starts an engine beside it that must not come up.

    Raises:
        RigError: a member was lost, or a step could not be done.
    """
    results: dict[str, Result] = {}
    for step in scenario.steps:
        if isinstance(step, Turn):
            running = turn(step)
            continue
        began = time.monotonic()
        if isinstance(step, Drain):
            results[step.name] = do_drain(running, step)
            told = f"draining {' and '.join(step.engines)}"
        elif isinstance(step, Refusal):
            results[step.name] = refusal(step)
            told = f"starting {step.engine}"
        else:
            results[step.name] = do_send(running, step)
            told = f"{step.name} to {' and '.join(step.to)}"
        say(f"{scenario.name}: {told} took {time.monotonic() - began:.0f} s")
        errors = [answer.error for answer in results[step.name].answers if answer.error]
        if errors:
            say(f"{scenario.name}: {step.name}: {errors[0][:200]}")
    return running, results


@contextlib.contextmanager
def own_trees(boot: Boot, trees_of: Trees, say: Say) -> Iterator[dict[tuple[str, str], Tree]]:
    """``trees_of`` with a fresh copy of the stock tree for each role that has an engine with a tree of its own."""
    roles = sorted({part.role for part in boot.parts if part.tree == "own"})
    if not roles:
        yield dict(trees_of)
        return
    deployment.runs_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="own-", dir=deployment.runs_folder()) as folder:
        made = dict(trees_of)
        for role in roles:
            root = Path(folder) / role / "tree"
            shutil.copytree(trees_of[role, "stock"].root, root)
            made[role, "own"] = engine_tree.find(role, root)
            say(f"{role} own: {root}")
        yield made


def turn_trees(own: Trees, verb: str, say: Say) -> None:
    """Apply the bundle to, or revert it from, every own tree, and see that it then stands where it should.

    Raises:
        RigError: kinds ``apply``, ``drift``.
    """
    for (role, kind), one in sorted(own.items()):
        if kind == "own":
            trees.apply(role, one.root, revert=verb == "revert")
            level = trees.recognise(one, allow_drift=False)
            if (level == "base") != (verb == "revert"):
                raise RigError("apply", f"{one.root} stands at {level} after {verb}")
            say(f"{role} own: {verb}, now {level}")


def not_run(boot: Boot, scenarios: Sequence[Scenario], error: RigError) -> Report:
    """The report of a boot whose engines did not start."""
    note = f"{error.kind}: {error}"
    return Report(boot.name, [Line(scenario.name, "the engines start", None, False, note) for scenario in scenarios])


def run_boot(
    boot: Boot,
    scenarios: Sequence[Scenario],
    trees_of: Trees,
    router: str = "wheel",
    say: Say = lambda text: None,
    extra_env: Mapping[str, Mapping[str, str]] | None = None,
    keep: dict[str, Results] | None = None,
) -> Report:
    """Start ``boot``, run ``scenarios`` on it, end it; a crash is a line that does not hold, not an exception.

    Args:
        keep: is filled with what each scenario brought, by its name.

    Raises:
        RigError: anything that is refused before the engines start.
    """
    report = Report(boot.name)
    began = time.monotonic()
    with own_trees(boot, trees_of, say) as found:

        def begin() -> Running:
            return start(boot, found, router, say=say, only=needed(boot, scenarios), extra_env=extra_env)

        try:
            running = begin()
        except RigError as error:
            if error.kind != "crash":
                raise
            for line in error.tail:
                say("  " + line)
            return not_run(boot, scenarios, error)
        report.folder = running.deployment.folder
        report.start_s = time.monotonic() - began
        state = running.deployment.state()
        report.ready_s = {name: member["ready_after_s"] for name, member in state["members"].items()}
        watch = _MemoryWatch(running.deployment)

        def turn(step: Turn) -> Running:
            nonlocal running
            running.deployment.down()
            turn_trees(found, step.verb, say)
            running = begin()
            watch.deployment = running.deployment
            return running

        def refusal(step: Refusal) -> Result:
            return do_refusal(boot, step, found, say)

        try:
            for scenario in scenarios:
                try:
                    running, results = run_steps(running, scenario, turn, refusal, say)
                except RigError as error:
                    for line in error.tail:
                        say("  " + line)
                    report.lines.append(Line(scenario.name, "the engines go on", None, False, f"{error.kind}: {error}"))
                    if error.kind == "crash":
                        break
                    continue
                if keep is not None:
                    keep[scenario.name] = results
                report.answers[scenario.name] = {
                    name: [answer.as_json() for answer in result.answers] for name, result in results.items()
                }
                report.rows[scenario.name] = [row for name, result in results.items() for row in rows(name, result)]
                report.lines += judge(scenario, results)
        finally:
            report.memory = watch.stop()
            running.deployment.down()
            report.run_s = time.monotonic() - began - report.start_s
    return report


class _MemoryWatch:
    """Looks at the memory of a deployment every few seconds and keeps the largest sum."""

    def __init__(self, running: deployment.Deployment) -> None:
        self.deployment = running
        self.largest = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        with contextlib.suppress(RigError):
            self.largest = max(self.largest, self.deployment.memory())

    def _run(self) -> None:
        while not self.ended.wait(5.0):
            self._look()

    def stop(self) -> int:
        """Look once more; the largest sum of proportional set sizes seen, in bytes."""
        self.ended.set()
        self.thread.join()
        self._look()
        return self.largest
