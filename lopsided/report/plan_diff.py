"""What differs between two plans.

In: two `Plan`s. Out: `Difference`s, most important first; none for plans that are equal but for how long planning took.
As tables, one for each respect (`difference_tables`).

The one idea: a plan is a list of facts, each a name with a text (`_facts`), and a difference is a name whose texts
differ. Names that differ in numbers only and have the same texts become one (`encoder.*.weight  I → S0@state  (24)`).
Plans of different models are compared as far as their names agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from lopsided.ir.program import Step
from lopsided.planner.plan_data import Plan
from lopsided.report.listing import device_rows, parameters_of, short_op
from lopsided.report.table import DATA, Column, Row, Table, bytes_text, pattern_of, seconds_text, share_text, skeleton
from lopsided.schedule.decisions import LEVELS

NONE = "–"
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


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: in what respect, which thing, how it is in either plan, and how many such there are."""

    about: str  # one of `_TITLES`
    what: str
    a: str
    b: str
    count: int = 1

    @property
    def change(self) -> str:
        return f"{self.a} → {self.b}" + (f"  ({self.count})" if self.count > 1 else "")

    def __str__(self) -> str:
        return f"{self.what}  {self.change}"


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


@dataclass(frozen=True, slots=True)
class _Fact:
    """What is known by this name. `number` tells apart what has one name, `suffix` stands behind a folded name."""

    about: str
    name: str
    suffix: str = ""
    number: int = 0


def diff_plans(a: Plan, b: Plan) -> tuple[Difference, ...]:
    here, there = dict(_facts(a)), dict(_facts(b))
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    for fact in dict.fromkeys((*here, *there)):
        # What only one of two models has says nothing.
        absent = fact.about in ("stored", "steps") and a.graph.fingerprint != b.graph.fingerprint
        one, other = here.get(fact, NONE), there.get(fact, NONE)
        if one != other and not (absent and NONE in (one, other)):
            groups.setdefault((fact.about, skeleton(fact.name), fact.suffix, one, other), []).append(fact.name)
    found = []
    if a.step_s != b.step_s:
        more = f" ({(b.step_s / a.step_s - 1) * 100:+.1f} %)" if a.step_s else ""
        found.append(Difference("step", "step", seconds_text(a.step_s), seconds_text(b.step_s) + more))
    found += [
        Difference(about, f"{pattern_of(alike)} {suffix}".rstrip(), one, other, len(alike))
        for (about, _, suffix, one, other), alike in groups.items()
    ]
    order = [*_TITLES]
    return tuple(sorted(found, key=lambda difference: order.index(difference.about)))


def _facts(plan: Plan) -> Iterator[tuple[_Fact, str]]:
    """All that two plans are compared by."""
    nodes, cluster = f"{len(plan.graph.nodes):,} nodes", plan.cluster
    yield _Fact("graph", "graph"), f"{nodes} ({plan.graph.fingerprint})"
    yield _Fact("cluster", "cluster"), f"{cluster.name}, {cluster.devices:,} devices ({cluster.fingerprint})"
    for key, seconds in asdict(plan.breakdown).items():
        yield _Fact("step", f"  {key.removesuffix('_s')}"), seconds_text(seconds)
    yield _Fact("options", "optimizer"), plan.optimizer
    yield _Fact("options", "parameters gathered again"), "yes" if plan.regather else "no"
    yield _Fact("options", "blocks that run again"), str(sum(one.level in LEVELS for one in plan.reruns))
    yield _Fact("options", "blocks that save in host memory"), str(sum(one.level == "offload" for one in plan.reruns))
    rows = [f"{rerun.rows:,}" for rerun in plan.reruns if rerun.level == "chunked"]
    yield _Fact("options", "rows of a loss at a time"), ", ".join(rows) or "all"
    where = [f"{one.percent} % on {plan.on.kinds[one.kind].name}" for one in plan.on_host]
    yield _Fact("options", "state in host memory"), ", ".join(where) or "none"
    yield _Fact("options", "bits of optimizer state"), str(plan.state_bits or "as it is")
    yield _Fact("options", "rounds of the batch"), str(plan.microbatches)
    yield _Fact("options", "sent at a time"), bytes_text(plan.bucket_bytes)
    yield _Fact("devices", "devices used"), str(len(plan.devices))
    for row in device_rows(plan):
        facts = {f"{by} share": share_text(share) for by, share in row.shares}
        facts |= {"memory": bytes_text(row.memory_bytes)} if row.shares else {}
        yield from ((_Fact("devices", name, fact), text) for fact, text in facts.items() for name in row.names)
    for name, placement in parameters_of(plan.program).items():
        yield _Fact("stored", name), str(placement)
    # Steps by where they are in the model and what they call: names of values say nothing about another model.
    seen: Counter[str] = Counter()
    for step in plan.program.steps:
        place = f"{step.node.source.module} {short_op(step.node.op)}".strip()
        seen[place] += 1
        yield _Fact("steps", place, number=seen[place]), _how(step)
    for b in plan.baselines:
        yield (
            _Fact("baselines", b.name),
            seconds_text(b.step_s) if b.fits and math.isfinite(b.step_s) else "does not fit",
        )


def _how(step: Step) -> str:
    chains = ", ".join("→".join(map(str, chain)) for chain in step.chains)
    how = "" if step.rule.how == "plain" else f" [{step.rule.how}]"
    return f"({chains}) : {', '.join(map(str, step.rule.gives))}{how}"
