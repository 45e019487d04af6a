"""Prices of collectives: never negative, growing with bytes and skew, in the order that networks show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.cluster.cluster import MEASURABLE, Cluster, Link
from lopsided.cluster.cluster_file import load_cluster, preset_names
from lopsided.cluster.collectives import COLLECTIVES, GROUPED, Algorithm, Network
from lopsided.errors import ClusterError
from tests.support import clusters
from tests.support.clusters import BETWEEN, WITHIN


def cluster(nodes: int, count: int, within: Link = WITHIN, between: Link = BETWEEN) -> Cluster:
    return clusters.cluster(clusters.kind(nodes=nodes, count=count), within=within, between=between)


def way(network: Network, collective: str, implementation: str) -> Algorithm:
    return next(way for way in network.ways(collective) if way.implementation == implementation)


LINKS = st.builds(Link, st.floats(0, 3600), st.floats(1, 1e18))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    ways = [(collective, name) for collective, names in MEASURABLE.items() for name in names]
    taken = draw(st.lists(st.sampled_from(ways), unique=True, max_size=4))
    one = cluster(draw(st.integers(1, 200)), draw(st.integers(1, 16)), draw(LINKS), draw(LINKS))
    return Network(replace(one, collectives=tuple((*key, draw(LINKS)) for key in taken)))


@given(networks(), st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1), st.floats(0, 1))
def test_prices_grow_with_bytes_and_skew(network: Network, a: float, b: float, c: float, d: float) -> None:
    n = network.cluster.devices
    few, many = sorted((a, b))
    even, skewed = sorted((1 + c * (n - 1), 1 + d * (n - 1)))
    for collective in COLLECTIVES:
        for one in network.ways(collective):
            assert min(one.latency_s, one.s_per_byte, one.s_per_largest_byte) >= 0
            assert one.seconds(few, even) <= one.seconds(many, even) < float("inf")
            assert one.seconds(few, even) <= one.seconds(few, skewed)
        best = network.best(collective, many, skewed)
        assert all(best.seconds(many, skewed) <= one.seconds(many, skewed) for one in network.ways(collective))


@pytest.mark.parametrize("name", preset_names())
def test_a_group_of_broadcasts_wins_when_one_device_has_most_of_a_large_tensor(name: str) -> None:
    network = Network(load_cluster(name))
    n = network.cluster.devices
    for collective in ("all_gather", "reduce_scatter"):
        grouped, padded = way(network, collective, "grouped"), way(network, collective, "padded")
        assert grouped.seconds(2**30, 0.9 * n) < padded.seconds(2**30, 0.9 * n)
        assert grouped.seconds(2**10) > padded.seconds(2**10)
        assert grouped.seconds(2**30) > padded.seconds(2**30)


@pytest.mark.parametrize("name", ["hap-64", "8xA100+8xV100", "mixed-1024"])
def test_the_best_way_changes_with_skew(name: str) -> None:
    network = Network(load_cluster(name))
    most = 0.9 * network.cluster.devices
    assert network.best("all_gather", 2**30).implementation == "padded"
    assert network.best("all_gather", 2**30, most).implementation == "grouped"
    assert network.best("all_gather", 2**10).implementation == "all_to_all"


def test_one_device_talks_to_nobody() -> None:
    alone = cluster(1, 1)
    for one in (alone, replace(alone, collectives=(("all_gather", "padded", Link(1.0, 1.0)),))):
        for collective in COLLECTIVES:
            assert Network(one).ways(collective)
            assert all(one.seconds(1e9) == 0 for one in Network(one).ways(collective))


def test_a_ring_in_one_node() -> None:
    network = Network(cluster(1, 8))
    assert way(network, "all_reduce", "ring").seconds(8e9) == pytest.approx(2 * 7 * 1e-5 + 2 * 7 / 8 * 8e9 / 1e10)
    assert way(network, "all_gather", "padded").seconds(8e9, 2.0) == pytest.approx(7 * 1e-5 + 7 / 8 * 16e9 / 1e10)
    assert way(network, "all_gather", "grouped").seconds(8e9, 2.0) == pytest.approx(
        14e-5 + 7 / 8 * 8e9 / 1e10 / GROUPED
    )
    assert way(network, "all_gather", "all_to_all").seconds(8e9) == pytest.approx(3e-5 + 7 / 8 * 8e9 / 1e10)
    assert way(network, "all_to_all", "direct").seconds(8e9) == pytest.approx(3e-5 + 7 / 64 * 8e9 / 1e10)
    assert way(network, "all_to_all", "gather").seconds(8e9) == way(network, "all_gather", "padded").seconds(8e9)


def test_a_ring_through_nodes_is_as_fast_as_the_slowest_link() -> None:
    network = Network(cluster(4, 8))
    ring = way(network, "all_reduce", "ring")
    assert ring.latency_s == pytest.approx(2 * (3 * 5e-5 + 28 * 1e-5))
    assert ring.s_per_byte == pytest.approx(2 * 31 / 32 / 1e9)
    slow_inside = Network(cluster(4, 8, Link(1e-5, 1e8)))
    assert way(slow_inside, "all_reduce", "ring").s_per_byte == pytest.approx(2 * 31 / 32 / 1e8)
    # Nodes of one device have no inside.
    lone = Network(cluster(4, 1, Link(1.0, 1.0)))
    assert way(lone, "all_reduce", "ring").s_per_byte == pytest.approx(2 * 3 / 4 / 1e9)


def test_the_devices_of_a_node_share_its_link() -> None:
    spread, packed = Network(cluster(16, 1)), Network(cluster(2, 8))
    assert way(spread, "all_to_all", "direct").s_per_largest_byte == pytest.approx(15 / 256 / 1e9)
    assert way(packed, "all_to_all", "direct").s_per_largest_byte == pytest.approx(8 * 8 / 256 / 1e9)


def test_all_reduce_is_a_scatter_and_a_gather() -> None:
    network = Network(cluster(4, 8))
    both, ring = way(network, "all_reduce", "scatter+gather"), way(network, "all_reduce", "ring")
    assert both.seconds(1e9) == pytest.approx(ring.seconds(1e9))
    # Pieces are chosen for the purpose, so the shares do not matter.
    assert both.s_per_largest_byte == 0


def test_ties_go_to_the_first() -> None:
    network = Network(cluster(1, 2, Link(0.0, 1e9)))
    assert network.best("all_reduce", 0).implementation == "ring"
    assert network.best("all_gather", 0).implementation == "padded"


def test_measured_figures_are_used_as_they_are() -> None:
    one = load_cluster("hap-64")
    network = Network(one)
    for collective, name, link in one.collectives:
        price = way(network, collective, name)
        assert price.seconds(1e9) == pytest.approx(link.latency_s + 1e9 / link.bytes_per_s)
        grows = name == "padded" or collective == "all_to_all"
        assert price.seconds(1e9, 2.0) == pytest.approx(link.latency_s + (1 + grows) * 1e9 / link.bytes_per_s)
    assert [one.implementation for one in network.ways("all_reduce")] == ["ring", "scatter+gather"]


def test_what_was_not_measured_is_as_far_off_the_model_as_its_nearest_relation() -> None:
    plain = cluster(4, 8)
    model = Network(plain)
    ring = way(model, "all_gather", "padded")
    slow = Link(3 * ring.latency_s, 0.5 / ring.s_per_byte_if_equal)
    network = Network(replace(plain, collectives=(("all_gather", "padded", slow),)))
    for collective in COLLECTIVES:
        for one, modelled in zip(network.ways(collective), model.ways(collective), strict=True):
            assert one.latency_s == pytest.approx(3 * modelled.latency_s)
            assert one.s_per_byte_if_equal == pytest.approx(2 * modelled.s_per_byte_if_equal)
    # Of two measured, the one that does the same on the wire.
    direct = way(model, "all_to_all", "direct")
    fast = Link(direct.latency_s, 7 / direct.s_per_byte_if_equal)
    network = Network(replace(plain, collectives=(("all_gather", "padded", slow), ("all_to_all", "direct", fast))))
    by_all_to_all, modelled = (way(net, "reduce_scatter", "all_to_all") for net in (network, model))
    assert by_all_to_all.s_per_byte_if_equal == pytest.approx(modelled.s_per_byte_if_equal / 7)


@pytest.mark.parametrize("name", ["hap-64", "hap-4"])
def test_the_model_explains_what_was_profiled(name: str) -> None:
    """Whatever the link really gives, all six figures put it within a fifth of the same.

    Not a proof: GROUPED is the mean of these very figures, and the two nodes of hap-4 were chosen because they fit.
    """
    one = load_cluster(name)
    model = Network(replace(one, collectives=()))
    measured = Network(one)
    off = [
        way(measured, collective, name).s_per_byte_if_equal / way(model, collective, name).s_per_byte_if_equal
        for collective, name, _ in one.collectives
    ]
    assert max(off) / min(off) < 1.2 / 0.8


def test_unknown_collectives_are_refused() -> None:
    with pytest.raises(ClusterError, match="no collective 'broadcast'"):
        Network(cluster(1, 2)).ways("broadcast")


def test_a_network_does_not_look_at_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are the only thing that grows with the number of devices."""
    one = load_cluster("mixed-1024")

    def fail(_: object) -> tuple[str, ...]:
        raise AssertionError("looked at devices")

    monkeypatch.setattr(Cluster, "device_names", property(fail))
    monkeypatch.setattr(Cluster, "node_names", property(fail))
    assert len(Network(one).ways("all_gather")) == 3


def hosts(names: str, bytes_per_s: float = 1e8, **more: Any) -> Cluster:
    """A node for each letter."""
    return clusters.cluster(*(clusters.kind(name, name) for name in names), between=Link(1e-4, bytes_per_s), **more)


def _as_measured(cluster: Cluster) -> Cluster:
    """With everything that can be measured measured to be what the model says."""
    found = [
        (way.collective, way.implementation, Link(way.latency_s, 1 / way.s_per_byte_if_equal))
        for name, ways in MEASURABLE.items()
        for way in Network(cluster).ways(name)
        if way.implementation in ways
    ]
    return replace(cluster, collectives=tuple(found))


@pytest.mark.parametrize("left", [[0, 1], [0, 2], [0, 1, 2]])
def test_a_part_of_a_measured_cluster_is_as_its_model_says(left: list[int]) -> None:
    slow = Link(1e-3, 2.5e7)
    pairs = tuple((near, far, slow) for near in "ab" for far in "cd")
    modelled = hosts("abcd", 1.25e8, pairs=pairs)
    fewer, wanted = _as_measured(modelled).only(left), Network(modelled.only(left))
    for name, ways in MEASURABLE.items():
        for way in ways:
            if way == "all_to_all" or name == "all_to_all":
                continue  # the model counts doublings there, not hops
            found = next(w for w in Network(fewer).ways(name) if w.implementation == way)
            model = next(w for w in wanted.ways(name) if w.implementation == way)
            assert found.seconds(1e6) - found.latency_s == pytest.approx(model.seconds(1e6) - model.latency_s)


def test_a_ring_is_as_slow_as_the_slowest_link_between_its_nodes() -> None:
    fast = hosts("abc")
    slow = replace(fast, pairs=(("b", "c", Link(1e-2, 1e6)),))
    ratio = Network(slow).best("all_reduce", 1e9).seconds(1e9) / Network(fast).best("all_reduce", 1e9).seconds(1e9)
    assert 90 < ratio < 101
    near = slow.only([0, 1])
    assert near.pairs == ()
    assert Network(near).best("all_reduce", 1e9) == Network(fast.only([0, 1])).best("all_reduce", 1e9)


def test_measured_skew_is_taken_as_measured() -> None:
    plain = hosts("ab")
    for skew in (0.0, 0.25, 1.0):
        one = replace(plain, collectives=(("all_gather", "padded", Link(1e-3, 1e8, skew)),))
        way = next(w for w in Network(one).ways("all_gather") if w.implementation == "padded")
        assert way.seconds(1e8, 1.0) == pytest.approx(1.001)
        assert way.seconds(1e8, 2.0) == pytest.approx(1.001 + skew)
