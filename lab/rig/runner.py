"""Runs scenarios on a boot: starts the engines, sends what each scenario says, and judges what must hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.rig import cache, client, deployment, engine, environment, models, ports
from lab.rig.boot import Boot, Part
from lab.rig.errors import RigError
from lab.rig.measure import MEASURES, NothingToMeasure, Result
from lab.rig.scenario import Kill, Scenario, Send
from lab.rig.tree import RELEASES, Tree

Trees = Mapping[tuple[str, str], Tree]
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
        start_s, run_s: seconds until everything was ready, and for the scenarios after that.
        memory: largest proportional set size seen, in bytes.
        folder: where the logs are.
    """

    boot: str
    lines: list[Line] = field(default_factory=list)
    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
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


def make_engine(part: Part, trees: Trees, pythons: Mapping[str, Path], port: int, bootstrap: int) -> engine.Engine:
    """Fill in what the boot's file leaves open: the tree, the interpreter, the model's folder and the ports."""
    tree = trees[part.role, part.tree]
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
        env={**part.env, **part.gates},
        tp=part.tp,
        dtype=part.dtype,
        tokens=part.tokens,
    )


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
    parts = [part for part in boot.parts if only is None or part.name in only]
    routers = [part for part in boot.routers if only is None or part.name in only]
    refusers = [part for part in boot.refusers if only is None or part.name in only]
    deployment.need_memory(sum(part.processes for part in parts))
    roles = {part.role for part in parts} | ({"decode"} if routers else set())
    pythons = {role: environment.ensure(RELEASES[role], say) for role in sorted(roles)}
    folder = deployment.new_folder(boot.name)
    chosen = ports.free(2 * len(parts) + 2 * len(routers) + len(refusers))
    for place, name in enumerate([part.name for part in parts] + [part.name for part in routers]):
        if ports_for and name in ports_for:
            ports.need_free(ports_for[name])
            chosen[2 * place] = ports_for[name]
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


def needed(boot: Boot, scenarios: Sequence[Scenario]) -> set[str]:
    """Members that the scenarios use, with the engines behind the routers among them."""
    names = {name for scenario in scenarios for name in scenario.engines}
    for router in boot.routers:
        if router.name in names:
            names |= {*router.prefill, *router.decode}
    return names | {refuser.of for refuser in boot.refusers if refuser.name in names}


def do_send(running: Running, send: Send) -> Result:
    """Send the requests of one step and gather the answers and the engines' lines.

    Raises:
        RigError: kind ``crash``; a member was lost meanwhile.
    """
    route, prefill, decode = running.route(send)
    for name in send.flush:
        try:
            client.flush(running.engines[name].port)
        except OSError as error:
            raise RigError("flush", f"{name} would not empty its cache: {error}") from error
    prompts = client.prompts(send.seed, send.count, send.length, send.vary, send.prefix)
    requests = [client.Request(prompt, send.new, str(index)) for index, prompt in enumerate(prompts)]
    running.deployment.mark()
    answers = client.send_all(route, requests, send.together, send.timeout)
    running.deployment.check(wait=5.0 if any(answer.error for answer in answers) else 0.0)
    events = {
        name: [(event.name, event.values) for event in running.deployment.events(name)]
        for name in {prefill, decode} - {""}
    }
    return Result(tuple(answers), events, prefill, decode)


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


def run_scenario(running: Running, scenario: Scenario, report: Report, say: Say) -> None:
    """Run one scenario on a running boot and add its lines to ``report``."""
    results: dict[str, Result] = {}
    for step in scenario.steps:
        if isinstance(step, Kill):
            running.deployment.kill(step.engine)
            continue
        began = time.monotonic()
        results[step.name] = do_send(running, step)
        say(f"{scenario.name}: {step.name} to {' and '.join(step.to)} took {time.monotonic() - began:.0f} s")
        errors = [answer.error for answer in results[step.name].answers if answer.error]
        if errors:
            say(f"{scenario.name}: {step.name}: {errors[0][:200]}")
    report.answers[scenario.name] = {
        name: [answer.as_json() for answer in result.answers] for name, result in results.items()
    }
    report.lines += judge(scenario, results)


def run_boot(
    boot: Boot,
    scenarios: Sequence[Scenario],
    trees: Trees,
    router: str = "wheel",
    say: Say = lambda text: None,
    extra_env: Mapping[str, Mapping[str, str]] | None = None,
) -> Report:
    """Start ``boot``, run ``scenarios`` on it, end it; a crash is a line that does not hold, not an exception.

    Raises:
        RigError: anything that is refused before the engines start.
    """
    report = Report(boot.name)
    began = time.monotonic()
    try:
        running = start(boot, trees, router, say=say, only=needed(boot, scenarios), extra_env=extra_env)
    except RigError as error:
        if error.kind != "crash":
            raise
        for line in error.tail:
            say("  " + line)
        note = f"{error.kind}: {error}"
        report.lines += [Line(scenario.name, "the engines start", None, False, note) for scenario in scenarios]
        return report
    report.folder = running.deployment.folder
    report.start_s = time.monotonic() - began
    state = running.deployment.state()
    report.ready_s = {name: member["ready_after_s"] for name, member in state["members"].items()}
    try:
        for scenario in scenarios:
            try:
                run_scenario(running, scenario, report, say)
            except RigError as error:
                for line in error.tail:
                    say("  " + line)
                report.lines.append(Line(scenario.name, "the engines go on", None, False, f"{error.kind}: {error}"))
                if error.kind == "crash":
                    break
            report.memory = max(report.memory, running.deployment.memory())
    finally:
        running.deployment.down()
        report.run_s = time.monotonic() - began - report.start_s
    return report
