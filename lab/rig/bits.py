"""The same requests on two sets of engines, whose answers must be the same to the last bit.

Either every engine is stock and then patched with every gate unset, or a boot is run twice as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lab.rig import client, faults, runner
from lab.rig.boot import DP_AWARE, Boot, Part, RouterPart
from lab.rig.lists import Entry
from lab.rig.runner import Line, Report, Results, Say, Trees
from lab.rig.scenario import Scenario, Send

# What breaks a transfer or an engine on purpose says nothing about bits.
RETRACT, RETRACTS_UNDER_DCP = "PATCHBUNDLE_RIG_RETRACT", "SGLANG_RESEARCH_DCP_RETRACT"
DISTURBANCES = (faults.VARIABLE, "PATCHBUNDLE_RIG_TRANSFER_FAIL", "PATCHBUNDLE_RIG_TRANSFER_HOLD")
# With it two runs of one stock engine differ in last bits (5e-7 of a log-probability), its requests one by one.
DP_ATTENTION = "--enable-dp-attention"
# Requests of a send that comes together: which of them share a batch differs from run to run, so they go one by one.
MOST_ONE_BY_ONE = 8


def one_by_one(one: Scenario) -> Scenario:
    """``one`` with its sends that come together one request after another, and with the first few of their requests."""
    steps = (
        replace(step, together=False, count=min(step.count, MOST_ONE_BY_ONE))
        if isinstance(step, Send) and step.together
        else step
        for step in one.steps
    )
    return replace(one, steps=tuple(steps))


def steady(one: Scenario, names: Mapping[str, str]) -> Scenario:
    """``one`` with only those sends that are the same in every run, and nothing that must hold.

    They reach P one after another, end by themselves, are meant to be answered, and go to members in ``names``. What is
    sent to one engine in place of another, and was sent to it before, is left out.

    Args:
        names: what each member is called on the boot that runs it.
    """
    steps: list[Send] = []
    for step in one.steps:
        if not isinstance(step, Send) or step.together or step.kill or step.leave or step.fails:
            continue
        if not step.members <= set(names):
            continue
        to, flush = (tuple(names[name] for name in group) for group in (step.to, step.flush))
        if to == step.to or not any(
            replace(step, name=before.name, to=to, flush=before.flush) == before for before in steps
        ):
            steps.append(replace(step, to=to, flush=flush))
    return replace(one, steps=tuple(steps), holds=())


def _engine(part: Part) -> Part:
    """What an engine is without its name, its gates and what disturbs it."""
    env = {name: value for name, value in part.env.items() if name not in DISTURBANCES}
    if RETRACTS_UNDER_DCP in part.gates:
        # The stock engine writes outside of its pool then, sooner or later: a crash, not bits.
        env.pop(RETRACT, None)
    return replace(part, name="", tree="stock", gates={}, env=env)


def _router(router: RouterPart) -> RouterPart:
    """What a router is without its gates, and without what no stock router may be told: see ``RouterPart``."""
    env = {name: value for name, value in router.env.items() if not name.startswith("SMG_")}
    return replace(router, env=env, flags=tuple(flag for flag in router.flags if flag != DP_AWARE))


def stock(entry: Entry) -> Entry:
    """An entry without gates, faults and disturbances, all of it stock.

    Engines that only a gate makes possible are left out, with whatever is sent to them, and so are those with data
    parallel attention. Of engines, and of routers, that are now the same the first stands for all.
    """
    parts: dict[str, Part] = {}
    names: dict[str, str] = {}
    for part in entry.boot.parts:
        if not part.gated and DP_ATTENTION not in part.flags:
            alike = (other.name for other in parts.values() if _engine(other) == _engine(part))
            names[part.name] = next(alike, part.name)
            parts.setdefault(names[part.name], replace(_engine(part), name=part.name))
    routers: dict[str, RouterPart] = {}
    for router in map(_router, entry.boot.routers):
        if {*router.prefill, *router.decode} <= set(names):
            prefill, decode = (tuple(names[name] for name in side) for side in (router.prefill, router.decode))
            bare = replace(router, prefill=prefill, decode=decode, build=router.build and "stock")
            same = (one.name for one in routers.values() if replace(one, name=bare.name) == bare)
            names[router.name] = next(same, router.name)
            routers.setdefault(names[router.name], bare)
    scenarios = (steady(one_by_one(one), names) for one in entry.scenarios)
    which = replace(entry.boot, parts=tuple(parts.values()), routers=tuple(routers.values()), refusers=())
    return Entry(which, tuple(one for one in scenarios if one.steps))


def _join(host: Entry, guest: Entry) -> Entry | None:
    """``host`` with the scenarios of ``guest`` if it has all engines that they need; else ``None``."""
    used = runner.needed(guest.boot, guest.scenarios)
    names = {
        part.name: other.name
        for part in guest.boot.parts
        for other in host.boot.parts
        if part.name in used and _engine(part) == _engine(other)
    }
    if set(names) != used:
        return None
    return replace(host, scenarios=(*host.scenarios, *(steady(one, names) for one in guest.scenarios)))


def without_gates(entries: Sequence[Entry]) -> list[Entry]:
    """The entries all stock, each set of engines once: scenarios of a boot that another holds whole run on that."""
    made: list[Entry] = []
    for entry in sorted(map(stock, entries), key=lambda one: -len(runner.needed(one.boot, one.scenarios))):
        if not entry.scenarios:
            continue
        for index, host in enumerate(made):
            joined = _join(host, entry)
            if joined is not None:
                made[index] = joined
                break
        else:
            made.append(entry)
    return made


def as_they_are(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with their gates, and with those sends alone that are the same in every run."""
    made = []
    for entry in entries:
        boot = entry.boot
        known = [[one.name for one in kind] for kind in (boot.parts, boot.routers, boot.refusers)]
        names = {name: name for group in known for name in group}
        scenarios = (steady(one, names) for one in entry.scenarios)
        made.append(replace(entry, scenarios=tuple(one for one in scenarios if one.steps)))
    return [entry for entry in made if entry.scenarios]


def patched(boot: Boot) -> Boot:
    """A stock boot with every engine, and every router that is built here, patched; its gates stay unset."""
    return replace(
        boot,
        name=f"{boot.name}-patched",
        parts=tuple(replace(part, tree="patched") for part in boot.parts),
        routers=tuple(replace(router, build=router.build and "patched") for router in boot.routers),
    )


def again(boot: Boot) -> Boot:
    """The same boot under another name."""
    return replace(boot, name=f"{boot.name}-again")


def run_twice(
    first: Boot,
    second: Boot,
    scenarios: Sequence[Scenario],
    trees_of: Trees,
    router: str = "wheel",
    say: Say = lambda text: None,
) -> list[Report]:
    """Run the scenarios on one boot and then on the other, and compare every answer.

    Returns:
        two reports; the lines of the first tell for each send that all of it was answered, those of the second that
        the answers are the same to the last bit.
    """
    reports: list[Report] = []
    found: list[dict[str, Results]] = []
    for which in (first, second):
        brought: dict[str, Results] = {}
        reports.append(runner.run_boot(which, scenarios, trees_of, router, say, keep=brought))
        found.append(brought)
        if len(brought) != len(scenarios):
            return reports
    for name, results in found[0].items():
        for send, result in results.items():
            done = sum(not answer.error and bool(answer.ids) for answer in result.answers)
            reports[0].lines.append(Line(name, f"done({send})", done, done == len(result.answers)))
            difference = client.compare(result.answers, found[1][name][send].answers)
            what = f"bits({send}) are the same"
            reports[1].lines.append(Line(name, what, difference.logprob, difference.bitwise))
    return reports
