"""A run that does what its plan predicts, only slower, and a plan whose every name is hostile."""

from __future__ import annotations

from dataclasses import replace

from lopsided.calibration.run_record import DeviceRun, Run, Span, StepRun
from lopsided.planner.plan_data import Baseline, Plan
from lopsided.report.chart import COMPUTE, OPTIMIZER, predicted_chart
from tests.support.plans import plan_of

HOSTILE = '"><img src="https://example.org/x" onerror="window.bad=1"></script><script>window.bad=1</script>'


def run_of(plan: Plan, *, slower: float = 1.25, hardware: str = "a box", model: str = "block") -> Run:
    """Three steps, of which the middle one is recorded; the first device is later than the others by 1 µs."""
    chart = predicted_chart(plan)
    devices = []
    for strip in chart.strips:
        for name in strip.devices:
            late = 1e-6 if name == plan.devices[0] else 0.0
            spans = [
                Span(
                    "compute",
                    "optimizer" if block.phase == OPTIMIZER else block.what,
                    late + slower * block.start_s,
                    late + slower * block.end_s,
                )
                for block in strip.blocks
                if block.doing == COMPUTE
            ]
            spans += [
                Span(
                    "network",
                    sent.what,
                    late + slower * sent.start_s,
                    1e-6 + slower * sent.end_s,
                    sent.collective,
                    sent.way,
                    sent.whole_bytes,
                )
                for sent in chart.network
            ]
            timed = StepRun(slower * plan.step_s)
            recorded = StepRun(slower * plan.step_s + 2e-6, tuple(spans))
            devices.append(DeviceRun(name, hardware, 2**20, (timed, recorded, timed)))
    return Run(model, "2.13", plan, tuple(devices))


def hostile_plan() -> Plan:
    """All the texts that a plan file may hold, and none of them meant well."""
    plan = plan_of()
    return replace(
        plan,
        cluster=replace(
            plan.cluster,
            name="<b>bold",
            about=HOSTILE,
            kinds=tuple(replace(kind, name=f"<i>{kind.name}&", node="<u>box") for kind in plan.cluster.kinds),
        ),
        on=replace(
            plan.on, kinds=tuple(replace(kind, name=f"<i>{kind.name}&", node="<u>box") for kind in plan.on.kinds)
        ),
        baselines=(Baseline(HOSTILE, HOSTILE, plan.step_s * 2, True),),
        search=replace(plan.search, why=HOSTILE, rounds=(HOSTILE,)),
        without_device=(),
        without_node=((HOSTILE, plan.step_s * 2),),
        notes=(HOSTILE,),
    )
