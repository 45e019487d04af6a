"""After a run: the cluster of its plan, corrected by what the run saw.

In: a `Run`. Out: `Calibrated`. Every call, update and collective that was recorded is an observation (`observed_run`);
tables of devices that the plan left out follow those of devices they are alike to (`calibrate`).
"""

from __future__ import annotations

from dataclasses import replace

from lopsided.calibration.calibrate import RUN, Calibrated, calibrate
from lopsided.calibration.comparison import observed_run
from lopsided.calibration.run_record import Run


def calibrated_by(run: Run) -> Calibrated:
    """The cluster of a run's plan as the run shows it, with a note of that."""
    calls, transfers = observed_run(run)
    found = calibrate(run.plan.cluster, calls, transfers, ran_on=run.plan.on, limits=RUN)
    kept = run.plan.cluster.about.split(" Corrected by a run of ")[0]
    note = f"Corrected by a run of {run.model} in steps of {run.step_s:.4g} s."
    return replace(found, cluster=replace(found.cluster, about=f"{kept} {note}".strip()))
