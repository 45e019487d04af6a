"""Clusters print and load back equal, lose devices and keep their names, and are faster where fewer crowd a chip."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lopsided.cluster.cluster import MEASURABLE, Cluster, Kind, Link, Measured
from lopsided.cluster.cluster_file import load_cluster, parse_cluster
from lopsided.errors import ClusterError
from tests.support.clusters import cluster, kind

# Random clusters

NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="/"), min_size=1, max_size=8)
WORDS = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" \n"), max_size=40)
RATES = st.floats(1, 1e18)
SECONDS = st.floats(0, 3600)
LINKS = st.builds(Link, SECONDS, RATES)
POINTS = st.dictionaries(st.floats(0, 1), SECONDS, min_size=1, max_size=3).map(lambda points: tuple(points.items()))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    places = draw(st.dictionaries(NAMES, st.integers(1, 4), min_size=1, max_size=3))
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        node = draw(st.sampled_from(sorted(places)))
        speeds = draw(st.dictionaries(st.sampled_from(("f64", "f32", "bf16", "f16")), RATES, min_size=1))
        tables = draw(st.dictionaries(NAMES, st.tuples(POINTS, st.one_of(st.just(()), POINTS)), max_size=2))
        measured = tuple(Measured(call, *points) for call, points in tables.items())
        numbers = draw(RATES), draw(st.integers(1, 2**60)), draw(SECONDS)
        count = draw(st.integers(1, 3))
        contention = draw(st.one_of(st.just(1.0), st.floats(1, 100)))
        one = Kind(draw(NAMES), node, places[node], count, tuple(speeds.items()), *numbers, draw(WORDS), measured)
        kinds.append(replace(one, contention=contention))
    ways = [(collective, way) for collective, names in MEASURABLE.items() for way in names]
    taken = draw(st.lists(st.sampled_from(ways), unique=True))
    try:
        return Cluster(
            draw(NAMES),
            draw(WORDS),
            tuple(kinds),
            draw(LINKS),
            draw(LINKS),
            tuple((*way, draw(LINKS)) for way in taken),
        )
    except ClusterError as error:
        assume("two nodes are called" not in error.what)
        raise


@given(clusters())
def test_a_cluster_prints_and_loads_back_equal(one: Cluster) -> None:
    again = parse_cluster(one.text(), "printed")
    assert again == one
    assert again.text() == one.text()
    assert again.fingerprint == one.fingerprint


@given(clusters())
def test_names_are_unique_and_in_order(one: Cluster) -> None:
    assert len({*one.device_names}) == len(one.device_names) == one.devices
    assert len({*one.node_names}) == len(one.node_names) == one.nodes
    assert {name.split("/")[0] for name in one.device_names} == {*one.node_names}
    assert one.spans[-1][1] == one.devices
    for part, (start, stop) in zip(one.kinds, one.spans, strict=True):
        assert stop - start == part.devices
        assert all(f"/{part.name}-" in name for name in one.device_names[start:stop])


@given(clusters(), st.data())
def test_devices_are_lost_one_by_one(one: Cluster, data: st.DataObject) -> None:
    while one.devices > 1:
        name = data.draw(st.sampled_from(one.device_names))
        less = one.without_device(name)
        assert less.devices == one.devices - 1
        assert less.fingerprint != one.fingerprint
        assert parse_cluster(less.text()) == less
        # All nodes keep their names, but that of a node that is empty now.
        assert {*less.node_names} <= {*one.node_names}
        assert one.nodes - less.nodes in (0, 1)
        one = less
    with pytest.raises(ClusterError, match="no device is left"):
        one.without_device(one.device_names[0])


@given(clusters(), st.data())
def test_nodes_are_lost_one_by_one(one: Cluster, data: st.DataObject) -> None:
    while one.nodes > 1:
        name = data.draw(st.sampled_from(one.node_names))
        inside = [device for device in one.device_names if device.startswith(f"{name}/")]
        less = one.without_node(name)
        assert less.nodes == one.nodes - 1
        assert less.devices == one.devices - len(inside)
        assert {*less.node_names} < {*one.node_names}
        assert parse_cluster(less.text()) == less
        one = less
    with pytest.raises(ClusterError, match="no device is left"):
        one.without_node(one.node_names[0])


@given(clusters())
def test_alike_is_what_cannot_be_told_apart_when_lost(one: Cluster) -> None:
    groups = one.alike_devices()
    assert sorted(name for group in groups for name in group) == sorted(one.device_names)
    for group in groups:
        left = {_contents(one.without_device(name)) for name in group} if one.devices > 1 else set()
        assert len(left) <= 1
    groups = one.alike_nodes()
    assert sorted(name for group in groups for name in group) == sorted(one.node_names)
    for group in groups:
        left = {_contents(one.without_node(name)) for name in group} if one.nodes > 1 else set()
        assert len(left) <= 1


def _contents(one: Cluster) -> tuple[tuple[str, ...], ...]:
    """What is in the nodes, whatever they are called."""
    nodes: dict[str, list[str]] = {name: [] for name in one.node_names}
    for part, (start, stop) in zip(one.kinds, one.spans, strict=True):
        for name in one.device_names[start:stop]:
            nodes[name.rsplit("/", 1)[0]].append(part.likeness)
    return tuple(sorted(tuple(sorted(inside)) for inside in nodes.values()))


# Names and smaller clusters, by example


def test_devices_are_named_by_node_kind_and_number() -> None:
    assert cluster(kind(count=2), kind("t4")).device_names == ("box/v100-1", "box/v100-2", "box/t4-1")
    assert cluster(kind(nodes=2)).device_names == ("box-1/v100-1", "box-2/v100-1")


def test_equal_kinds_in_one_node_are_counted_on() -> None:
    assert cluster(kind(count=2), kind(count=1)).device_names == ("box/v100-1", "box/v100-2", "box/v100-3")
    assert cluster(kind(count=2), kind(count=1)).alike_devices() == (("box/v100-1", "box/v100-2", "box/v100-3"),)


def test_of_two_nodes_both_keep_their_names() -> None:
    less = cluster(kind(nodes=2, count=8)).without_device("box-1/v100-3")
    assert [(part.node, part.nodes, part.count) for part in less.kinds] == [("box-2", 1, 8), ("box-1", 1, 7)]
    assert cluster(kind(nodes=2)).without_node("box-1").node_names == ("box-2",)


def test_of_many_nodes_the_smaller_one_is_numbered_last() -> None:
    less = cluster(kind(nodes=16, count=8)).without_device("box-5/v100-3")
    assert [(part.node, part.nodes, part.count) for part in less.kinds] == [("box", 15, 8), ("box-16", 1, 7)]


def test_kinds_that_share_the_node_follow_it() -> None:
    less = cluster(kind(nodes=3, count=1), kind("t4", nodes=3, count=4)).without_device("box-2/v100-1")
    assert [(part.name, part.node, part.nodes, part.count) for part in less.kinds] == [
        ("v100", "box", 2, 1),
        ("t4", "box", 2, 4),
        ("t4", "box-3", 1, 4),
    ]


def test_only_some_kinds() -> None:
    one = cluster(kind(), kind("t4"), kind("l4", "other"))
    assert [part.name for part in one.only([2, 0]).kinds] == ["v100", "l4"]
    with pytest.raises(ClusterError, match="no kind 3"):
        one.only([3])
    with pytest.raises(ClusterError, match="no device is left"):
        one.only([])


def test_measured_collectives_stay_while_there_are_nodes_to_talk_between() -> None:
    one = load_cluster("hap-64")
    for fewer in (one.without_device("v100-box-1/v100-1"), one.without_node("p100-box-3")):
        assert [entry[:2] for entry in fewer.collectives] == [entry[:2] for entry in one.collectives]
    assert load_cluster("hap-4").only([0]).collectives == ()


def test_alike_needs_alike_nodes() -> None:
    one = cluster(kind(node="a", count=2), kind(node="b", count=2), kind(node="c"), kind("t4", "c", speed=1.0))
    assert one.alike_devices() == (("a/v100-1", "a/v100-2", "b/v100-1", "b/v100-2"), ("c/v100-1",), ("c/t4-1",))
    assert one.alike_nodes() == (("a", "b"), ("c",))


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"no device 'box/v100-9'\n.*\n.*did you mean box/v100-1"):
        cluster(kind()).without_device("box/v100-9")
    with pytest.raises(ClusterError, match=r"no node 'bax'\n.*\n.*did you mean box"):
        cluster(kind()).without_node("bax")


# Fingerprints and speeds


def test_a_fingerprint_is_of_what_matters() -> None:
    one = cluster(kind(), kind("t4", "other"))
    renamed = Cluster("x", "y", (replace(kind("a", "b"), source="s"), kind("c", "d")), one.within, one.between)
    assert one.fingerprint == renamed.fingerprint
    assert len(one.fingerprint) == 16
    others = [
        cluster(kind(), kind("t4")),
        cluster(kind(), kind("t4", "other", count=2)),
        cluster(kind(), kind("t4", "other", nodes=2)),
        cluster(kind(), kind("t4", "other", speed=2.0)),
        replace(one, within=Link(1e-5, 2e10)),
        replace(one, between=Link(1e-5, 2e10)),
        replace(one, collectives=(("all_reduce", "ring", Link(0, 1e9)),)),
        cluster(replace(kind(), measured=(Measured("f()", ((1.0, 1.0),)),)), kind("t4", "other")),
        cluster(replace(kind(), launch_s=1.0), kind("t4", "other")),
        cluster(replace(kind(), memory_bytes=1), kind("t4", "other")),
        cluster(replace(kind(), bytes_per_s=1.0), kind("t4", "other")),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


def test_speeds_of_dtypes_that_are_not_listed() -> None:
    v100 = replace(kind(), flops_per_s=(("f32", 10.0), ("f16", 80.0)))
    assert [v100.flops(dtype) for dtype in ("f32", "f16", "bf16", "f64", "i64")] == [10, 80, 10, 5, 10]
    a100 = replace(kind(), flops_per_s=(("f32", 10.0), ("bf16", 80.0), ("f64", 6.0)))
    assert [a100.flops(dtype) for dtype in ("f16", "f64", "c128", "c64")] == [80, 6, 6, 10]
    half = replace(kind(), flops_per_s=(("bf16", 80.0), ("f16", 90.0)))
    assert (half.flops("f32"), half.speed, a100.speed) == (80, 90, 10)


# Links and what sending costs


def test_slowdowns_skew_and_links_between_two_nodes_print_and_load_back() -> None:
    one = cluster(
        *(kind(node="a", compute_slowdown=0.25, overhead_s=1e-5), kind(node="b"), kind(node="d")),
        collectives=(("all_gather", "padded", Link(1e-3, 1e8, 0.5)),),
        pairs=(("a", "d", Link(1e-2, 1e6)),),
        comm_slowdown=1.5,
    )
    assert parse_cluster(one.text()) == one
    plain = replace(one, pairs=(), comm_slowdown=1.0, collectives=(("all_gather", "padded", Link(1e-3, 1e8)),))
    assert len({one.fingerprint, plain.fingerprint, replace(one, comm_slowdown=2.0).fingerprint}) == 3
    assert one.without_node("d").pairs == ()
    assert one.without_node("b").pairs == one.pairs


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ((("a", "a", Link(0.0, 1e6)),), "no link between nodes 'a' and 'a'"),
        ((("a", "z", Link(0.0, 1e6)),), "no link between nodes 'a' and 'z'"),
        ((("a", "b", Link(0.0, 1e6)), ("b", "a", Link(0.0, 1e6))), "given twice"),
    ],
)
def test_links_between_nodes_that_are_not_there_are_refused(
    pairs: tuple[tuple[str, str, Link], ...], said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        cluster(kind(node="a"), kind(node="b"), pairs=pairs)


def test_a_link_of_its_own_needs_a_node_of_its_own() -> None:
    pairs = (("a", "b-1", Link(0.0, 1e6)),)
    with pytest.raises(ClusterError, match="one of several of one name"):
        cluster(kind(node="a"), kind(node="b", nodes=2), pairs=pairs)


# Crowding


def crowded(name: str = "gpu", contention: float = 1.6, count: int = 1, node: str = "box", nodes: int = 1) -> Kind:
    table = (Measured("f()", ((0.5, 0.4), (1.0, 0.8)), ((1.0, 1.6),)), Measured("update:sgd(f32[9])", ((1.0, 0.2),)))
    one = replace(kind(name, node, nodes, count), measured=table, compute_slowdown=0.25, overhead_s=1e-5)
    return replace(one, contention=contention)


def numbers(one: Kind) -> list[float]:
    """Seconds of all that takes some; 1 / speed of what has one."""
    seconds = [s for entry in one.measured for points in (entry.forward, entry.backward) for _, s in points]
    return [*seconds, one.launch_s, one.overhead_s, 1 / one.bytes_per_s, *(1 / flops for _, flops in one.flops_per_s)]


def assert_times(now: Kind, was: Kind, times: float) -> None:
    assert numbers(now) == pytest.approx([times * number for number in numbers(was)])
    assert (now.memory_bytes, now.compute_slowdown) == (was.memory_bytes, was.compute_slowdown)
    fractions = [[[f for f, _ in points] for points in (m.forward, m.backward)] for m in now.measured]
    assert fractions == [[[f for f, _ in points] for points in (m.forward, m.backward)] for m in was.measured]


def test_crowding_prints_loads_back_and_is_part_of_a_fingerprint() -> None:
    one = cluster(crowded(), crowded("t4"))
    assert parse_cluster(one.text()) == one
    assert one.text().count("contention = 1.6") == 2
    others = [cluster(crowded(contention=c), crowded("t4")) for c in (1.0, 1.7)]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 3
    assert "contention" not in cluster(kind()).text()


def test_fingerprints_of_clusters_without_crowding_stay() -> None:
    assert load_cluster("hap-64").fingerprint == "502bcd4d98afb61a"
    preset = load_cluster("3090+3060")
    before = replace(preset, kinds=tuple(replace(one, host_bytes_per_s=0.0) for one in preset.kinds))
    assert before.fingerprint == "7fc54826a0bd11be" != preset.fingerprint
    measured = replace(kind(count=2), compute_slowdown=0.25, overhead_s=1e-5)
    assert cluster(measured, kind("t4")).fingerprint == "1bd3e0c86b80820d"


def test_fewer_devices_of_a_node_are_faster() -> None:
    """c = 1.6, n = 4: alone 1 / 1.6 of the seconds, with m at work (1 + 0.6 (m - 1) / 3) / 1.6."""
    one = cluster(crowded("a"), crowded("b", contention=2.0, count=2), crowded("c"))
    (alone,) = one.only([0]).kinds
    assert_times(alone, one.kinds[0], 1 / 1.6)
    assert alone.contention == 1
    a, c = one.only([0, 2]).kinds
    for left, was in ((a, one.kinds[0]), (c, one.kinds[2])):
        assert_times(left, was, 1.2 / 1.6)
        assert left.contention == pytest.approx(1.2)
    a, b = one.only([0, 1]).kinds
    assert_times(a, one.kinds[0], 1.4 / 1.6)
    assert_times(b, one.kinds[1], (1 + 2 / 3) / 2)
    assert one.only([0, 1, 2]) == one


def test_devices_lost_one_by_one_are_as_fast_as_if_lost_at_once() -> None:
    one = cluster(crowded("a"), crowded("b"), crowded("c"), crowded("d"))
    less = one.without_device("box/d-1").without_device("box/b-1")
    at_once = one.only([0, 2])
    for slowly, quickly in zip(less.kinds, at_once.kinds, strict=True):
        assert_times(slowly, quickly, 1.0)
        assert slowly.contention == pytest.approx(quickly.contention)


def test_other_nodes_crowd_nobody() -> None:
    one = cluster(crowded("a", count=2), crowded("b", node="other", nodes=3, count=2))
    assert one.only([0]).kinds == one.kinds[:1]
    assert one.without_node("box").kinds == one.kinds[1:]
    assert one.without_node("other-2").kinds[1] == replace(one.kinds[1], nodes=2)
    a, others, odd = one.without_device("other-1/b-2").kinds
    assert (a, others) == (one.kinds[0], replace(one.kinds[1], nodes=2))
    assert (odd.node, odd.count, odd.contention) == ("other-3", 1, 1.0)
    assert_times(odd, one.kinds[1], 1 / 1.6)


def test_devices_that_do_not_crowd_each_other_stay_as_they_are() -> None:
    one = cluster(crowded("a", 1.0, count=2), crowded("b", 1.0))
    assert one.only([0]).kinds == one.kinds[:1]
    assert one.without_device("box/a-2").kinds == (replace(one.kinds[0], count=1), one.kinds[1])


def test_no_speed_grows_beyond_what_a_file_may_say() -> None:
    fast = replace(crowded(contention=100.0, count=2), flops_per_s=(("f32", 1e24),), bytes_per_s=1e18)
    less = cluster(fast).without_device("box/gpu-1")
    assert parse_cluster(less.text()) == less


@given(clusters(), st.data())
def test_devices_are_the_same_whoever_works_beside_them(one: Cluster, data: st.DataObject) -> None:
    # A hundred times faster it still is what a file may say: what is cut off is forgotten.
    one = replace(one, kinds=tuple(replace(part, bytes_per_s=min(part.bytes_per_s, 1e16)) for part in one.kinds))
    wanted = data.draw(st.sets(st.integers(0, len(one.kinds) - 1), min_size=1))
    for number, part in zip(sorted(wanted), one.only(wanted).kinds, strict=True):
        assert part.is_same_alone(one.kinds[number])
        assert one.kinds[number].is_same_alone(part)
        memory, launch_s = part.memory_bytes, part.launch_s
        other = replace(part, memory_bytes=2 * memory if memory < 2**40 else memory // 2)
        slower = replace(part, launch_s=launch_s / 2 if launch_s > 1 else launch_s + 1)
        assert not other.is_same_alone(one.kinds[number])
        assert not slower.is_same_alone(one.kinds[number])
