"""What each device and each node is worth: the step without it.

In: a `CandidatePool` that has found a good plan. Out: seconds for each name. A smaller cluster that turns out to be
faster becomes the best.

Of few kinds, each is taken away and what is left is planned anew, at the prices that led to the best plan. Of many that
would take as many plans: there the step without a device is the plan's own, times as much as its program is estimated
to take longer (`estimate`). What an estimate promises to be faster, or cannot tell because memory is short, is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lopsided.cluster.cluster import Cluster
from lopsided.planner.candidates import BETTER, Candidate, Learned, memory_limits
from lopsided.planner.part_search import PartSearch
from lopsided.planner.proposals import CandidatePool
from lopsided.planner.recompute import on_every_kind
from lopsided.planner.rounds import is_freed
from lopsided.planner.search_cost import NOTHING_HIDDEN

# Devices are taken away in three turns at most: the next begins where one found a better plan.
_TURNS = 3
# With so few groups of devices that are alike, what is left without one is planned anew.
_FEW_GROUPS = 4
# A cluster whose own step is 1.1 times as long as one found without a device is not planned without it.
_CLOSE = 1.1
# Where worth is estimated, a gain of less than 1 % is not followed up.
_MORE = 1.01
# Of what is estimated to be faster, or not to fit, four are tried in a turn.
_TRIES = 4

Worth = tuple[dict[str, float], dict[str, float]]
Shrink = Callable[[Cluster, str], Cluster]


def worth(pool: CandidatePool, cluster: Cluster) -> Worth:
    """The step without each device, and without each node."""
    devices: dict[str, float] = {}
    nodes: dict[str, float] = {}
    for _ in range(_TURNS):
        before = pool.chosen
        without = _Without(pool, cluster)
        if cluster.nodes > 1:
            nodes |= without.each(cluster.alike_nodes(), Cluster.without_node)
        if cluster.devices > 1:
            devices |= without.each(cluster.alike_devices(), Cluster.without_device)
        if before is pool.chosen or (without.by_estimates and before.step_s < _MORE * pool.chosen.step_s):
            break
        if before.on.fingerprint != pool.chosen.on.fingerprint:
            PartSearch(pool, pool.chosen.on).improve()
    # Who can do without a node can do without any one device of it.
    return {name: min(step_s, nodes.get(name.partition("/")[0], math.inf)) for name, step_s in devices.items()}, nodes


class _Without:
    """The best plan so far, and what is left of its devices without some."""

    def __init__(self, pool: CandidatePool, cluster: Cluster) -> None:
        self.pool, self.cluster, self.best = pool, cluster, pool.chosen
        self.names = {*self.best.on.device_names, *self.best.on.node_names}
        self.by_estimates = False
        self._made: dict[str, Candidate | None] = {}
        self.learned = pool.learned.get(self.best.on.fingerprint, Learned(bucket_bytes=self.best.bucket_bytes))

    def each(self, groups: Sequence[Sequence[str]], shrink: Shrink) -> dict[str, float]:
        """The step without one of each group of devices or nodes that are alike."""
        few = len(groups) <= _FEW_GROUPS
        self.by_estimates |= not few
        steps = [self._planned(alike, shrink) for alike in groups] if few else self._estimated(groups, shrink)
        return {name: step_s for alike, step_s in zip(groups, steps, strict=True) for name in alike}

    def _is_idle(self, alike: Sequence[str]) -> bool:
        """Whether one of these does nothing, and can take the place of the one that is gone."""
        return not self.names.issuperset(alike)

    def _left_over(self, name: str) -> bool:
        on = self.best.on
        return (on.devices if "/" in name else on.nodes) > 1

    def _planned(self, alike: Sequence[str], shrink: Shrink) -> float:
        """The step when one of these is gone; infinite if the model then fits nowhere."""
        if self._is_idle(alike):
            return self.best.step_s
        found_s = math.inf
        # What is left of the devices in use, and of all: an idle one may step in.
        wholes = [self.best.on, self.cluster] if self._left_over(alike[0]) else [self.cluster]
        for whole in {whole.fingerprint: whole for whole in wholes}.values():
            known = self.pool.of_part.get(whole.fingerprint)
            if known is None or known.step_s < _CLOSE * found_s:
                found_s = min(found_s, self._step_s(shrink(whole, alike[0])))
        return found_s

    def _step_s(self, part: Cluster) -> float:
        """The best that is made there at the prices that led to the best plan, and of its program."""
        made = [self._rebalanced(part)]
        if made[0] is None or made[0].step_s < _CLOSE * self.best.step_s or not is_freed(self.best):
            # Where memory is short a search takes long. It is for who may become the best.
            search = PartSearch(self.pool, part, self.learned)
            made.append(search.fitting("without", self.pool.by_speed(part), search.hidden or NOTHING_HIDDEN))
        if made[0] is None:
            made += self.pool.plain_balanced(part)
        return min((one.step_s for one in made if one is not None and one.fits), default=math.inf)

    def _rebalanced(self, part: Cluster) -> Candidate | None:
        """The best program on what is left. A node of one device is taken away once."""
        key, best = part.fingerprint, self.best
        if key not in self._made:
            shares, how = self.pool.by_speed(part), (best.regather, best.found)
            self._made[key] = self.pool.balanced(
                "without", part, best.program, shares, *how, bucket_bytes=best.bucket_bytes, reruns=on_every_kind(best)
            )
        return self._made[key]

    def _estimated(self, groups: Sequence[Sequence[str]], shrink: Shrink) -> list[float]:
        """The same by estimates, from the step of the best plan."""
        best, estimate = self.best, self.pool.estimate(self.best)
        all_s = estimate.on(best.on, memory_limits(best.on)).step_s
        others = [(one.step_s, {*one.on.device_names, *one.on.node_names}) for one in self.pool.of_part.values()]
        steps: list[float] = []
        faster: list[int] = []
        short: list[int] = []
        for number, alike in enumerate(groups):
            left_s = best.step_s if self._is_idle(alike) else math.inf
            if left_s == math.inf and self._left_over(alike[0]):
                part = shrink(best.on, alike[0])
                left = estimate.on(part, memory_limits(part))
                left_s = best.step_s * left.step_s / all_s
                if left_s < best.step_s * BETTER:
                    faster.append(number)
                elif not left.fits:
                    short.append(number)
            steps.append(left_s)
        self._try(sorted(faster, key=steps.__getitem__)[:_TRIES], groups, shrink, steps)
        # Who can do without a device can do without one that is worth less.
        short.sort(key=lambda number: -steps[number])
        for start in range(0, len(short), -(-len(short) // _TRIES) or 1):
            alike_enough = short[start : start + -(-len(short) // _TRIES)]
            self._try(alike_enough[:1], groups, shrink, steps)
            for number in alike_enough[1:]:
                steps[number] = steps[alike_enough[0]]
        # What was found on other devices does not need this one.
        for number, alike in enumerate(groups):
            found = [step_s for step_s, names in others if alike[0] not in names]
            steps[number] = max(min([steps[number], *found]), self.pool.chosen.step_s)
        return steps

    def _try(self, numbers: Sequence[int], groups: Sequence[Sequence[str]], shrink: Shrink, steps: list[float]) -> None:
        """What the best program takes without these, in place of an estimate."""
        for number in numbers:
            made = self._rebalanced(shrink(self.best.on, groups[number][0]))
            steps[number] = math.inf if made is None else made.step_s
