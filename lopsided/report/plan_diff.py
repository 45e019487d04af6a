"""What differs between two plans.

In: two `Plan`s. Out: `Difference`s, most important first; none for plans that are equal but for how long planning took.
As a table under each title (`difference_tables`).

Parameters and steps that differ in the same way are one difference: names that differ in numbers only become a pattern
(`encoder.*.weight  I → S0@state  (24)`). Plans of different models are compared as far as their names agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lopsided.ir.program import Step
from lopsided.planner.plan_data import Plan
from lopsided.report.listing import device_rows, parameters_of, short_op
from lopsided.report.table import DATA, Column, Row, Table, bytes_text, pattern_of, seconds_text, share_text, skeleton

NONE = "–"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: in what respect, which thing, how it is in either plan, and how many such there are."""

    about: str  # "graph", "cluster", "step", "devices", "options", "stored", "steps" or "baselines"
    what: str
    a: str
    b: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.what}  {self.change}"

    @property
    def change(self) -> str:
        return f"{self.a} → {self.b}" + (f"  ({self.count})" if self.count > 1 else "")


def diff_plans(a: Plan, b: Plan) -> tuple[Difference, ...]:
    return (
        *_inputs(a, b),
        *_predictions(a, b),
        *_options(a, b),
        *_devices(a, b),
        *_stored(a, b),
        *_steps(a, b),
        *_baselines(a, b),
    )


_TITLES = {
    "graph": "graph",
    "cluster": "cluster",
    "step": "a step",
    "options": "options",
    "devices": "devices",
    "stored": "how parameters are stored",
    "steps": "how steps are run",
    "baselines": "compared with",
}


def difference_tables(differences: Iterable[Difference]) -> list[Table]:
    """A table for each respect in which plans differ."""
    every = list(differences)
    keys = ("about", "what", "a", "b", "count")
    columns = (Column(most=50), Column(), *(Column(key=key, only=DATA) for key in keys))
    found = []
    for about, title in _TITLES.items():
        rows = tuple(Row((d.what, d.change, *(getattr(d, key) for key in keys))) for d in every if d.about == about)
        if rows:
            found.append(Table(title, columns, rows))
    return found


def _inputs(a: Plan, b: Plan) -> Iterator[Difference]:
    if a.graph.fingerprint != b.graph.fingerprint:
        yield Difference("graph", "graph", _graph_text(a), _graph_text(b))
    if a.cluster.fingerprint != b.cluster.fingerprint:
        yield Difference("cluster", "cluster", _cluster_text(a), _cluster_text(b))


def _graph_text(plan: Plan) -> str:
    return f"{len(plan.graph.nodes):,} nodes ({plan.graph.fingerprint})"


def _cluster_text(plan: Plan) -> str:
    return f"{plan.cluster.name}, {plan.cluster.devices:,} devices ({plan.cluster.fingerprint})"


def _predictions(a: Plan, b: Plan) -> Iterator[Difference]:
    if a.step_s != b.step_s:
        yield Difference("step", "step", seconds_text(a.step_s), f"{seconds_text(b.step_s)}{_percent(a, b)}")
    for what in ("compute", "optimizer", "blocking", "exposed", "waiting", "hidden"):
        before, after = getattr(a.breakdown, f"{what}_s"), getattr(b.breakdown, f"{what}_s")
        if before != after:
            yield Difference("step", f"  {what}", seconds_text(before), seconds_text(after))


def _percent(a: Plan, b: Plan) -> str:
    return f" ({(b.step_s / a.step_s - 1) * 100:+.1f} %)" if a.step_s else ""


def _options(a: Plan, b: Plan) -> Iterator[Difference]:
    if a.optimizer != b.optimizer:
        yield Difference("options", "optimizer", a.optimizer, b.optimizer)
    if a.regather != b.regather:
        words = {True: "yes", False: "no"}
        yield Difference("options", "parameters gathered again", words[a.regather], words[b.regather])
    if a.bucket_bytes != b.bucket_bytes:
        yield Difference("options", "sent at a time", bytes_text(a.bucket_bytes), bytes_text(b.bucket_bytes))


def _devices(a: Plan, b: Plan) -> Iterator[Difference]:
    if len(a.devices) != len(b.devices):
        yield Difference("devices", "devices used", str(len(a.devices)), str(len(b.devices)))
    names = dict.fromkeys((*a.cluster.device_names, *b.cluster.device_names))
    here, there = _by_device(a), _by_device(b)
    facts = dict.fromkeys(fact for of in (here, there) for each in of.values() for fact in each)
    for fact in facts:
        yield from _differing(
            "devices",
            fact,
            {name: here[name].get(fact, NONE) for name in names if name in here},
            {name: there[name].get(fact, NONE) for name in names if name in there},
        )


def _by_device(plan: Plan) -> dict[str, dict[str, str]]:
    """Of every device: its shares and the memory it uses, as text."""
    rows = {name: row for row in device_rows(plan) for name in row.names}
    return {
        name: {f"{by} share": share_text(share) for by, share in row.shares}
        | ({"memory": bytes_text(row.memory_bytes)} if row.shares else {})
        for name, row in rows.items()
    }


def _stored(a: Plan, b: Plan) -> Iterator[Difference]:
    here = {name: str(placement) for name, placement in parameters_of(a.program).items()}
    there = {name: str(placement) for name, placement in parameters_of(b.program).items()}
    yield from _differing("stored", "", *_comparable(a, b, here, there))


def _steps(a: Plan, b: Plan) -> Iterator[Difference]:
    """Steps by where they are in the model and what they call: names of values say nothing about another model."""
    here, there = _by_place(a), _by_place(b)
    names = {key: f"{place} {op}".strip() for key in (*here, *there) for place, op, _ in (key,)}
    yield from _differing("steps", "", *_comparable(a, b, here, there), names)


_Place = tuple[str, str, int]


def _by_place(plan: Plan) -> dict[_Place, str]:
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[_Place, str] = {}
    for step in plan.program.steps:
        place = (step.node.source.module, short_op(step.node.op))
        seen[place] += 1
        found[*place, seen[place]] = _how(step)
    return found


Key = TypeVar("Key", bound=Hashable)


def _comparable(
    a: Plan, b: Plan, here: Mapping[Key, str], there: Mapping[Key, str]
) -> tuple[Mapping[Key, str], Mapping[Key, str]]:
    """Of different models, what both have."""
    if a.graph.fingerprint == b.graph.fingerprint:
        return here, there
    return {k: v for k, v in here.items() if k in there}, {k: v for k, v in there.items() if k in here}


def _how(step: Step) -> str:
    chains = ", ".join("→".join(map(str, chain)) for chain in step.chains)
    how = "" if step.rule.how == "plain" else f" [{step.rule.how}]"
    return f"({chains}) : {', '.join(map(str, step.rule.gives))}{how}"


def _baselines(a: Plan, b: Plan) -> Iterator[Difference]:
    here, there = ({x.name: _or_none(x.step_s, x.fits) for x in plan.baselines} for plan in (a, b))
    yield from _differing("baselines", "", here, there, fold=False)


def _or_none(step_s: float, fits: bool) -> str:
    return seconds_text(step_s) if fits and math.isfinite(step_s) else "does not fit"


def _differing(
    about: str,
    suffix: str,
    here: Mapping[Key, str],
    there: Mapping[Key, str],
    names: Mapping[Key, str] | None = None,
    *,
    fold: bool = True,
) -> Iterator[Difference]:
    """What is not the same under the same key; alike differences of names alike but for numbers are one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key in dict.fromkeys((*here, *there)):
        a, b = here.get(key, NONE), there.get(key, NONE)
        if a != b:
            name = str(key) if names is None else names[key]
            groups.setdefault((skeleton(name) if fold else name, a, b), []).append(name)
    for (_, a, b), alike in groups.items():
        name = pattern_of(alike) if fold else alike[0]
        yield Difference(about, f"{name} {suffix}".rstrip(), a, b, len(alike))
