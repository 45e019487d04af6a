"""Cluster files load, presets say where their figures come from, and what cannot be used is refused in words."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lopsided.cluster.cluster import Link
from lopsided.cluster.cluster_file import load_cluster, parse_cluster, preset_names
from lopsided.errors import ClusterError
from tests.support.clusters import cluster, kind

SMALL = """
name = "small"
[[devices]]
name = "v100"
node = "box"
flops_per_s = 15.7e12
bytes_per_s = 900e9
memory = "16 GiB"
[links.within]
latency_s = 1e-5
bytes_per_s = 12e9
"""


def test_the_least_that_is_needed() -> None:
    one = parse_cluster(SMALL)
    assert (one.devices, one.nodes, one.node_names) == (1, 1, ("box",))
    assert one.kinds[0].flops_per_s == (("f32", 15.7e12),)
    assert one.kinds[0].memory_bytes == 16 * 2**30
    assert one.between == one.within
    assert parse_cluster(SMALL[: SMALL.index("[links")]).devices == 1


def test_efficiency_is_multiplied_in_and_printed_as_the_product() -> None:
    one = parse_cluster(SMALL.replace("memory", "efficiency = 0.5\nmemory"))
    assert one.kinds[0].flops("f32") == 15.7e12 * 0.5
    assert "efficiency" not in one.text()
    assert parse_cluster(one.text()) == one


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ('"512 MiB"', 2**29),
        ('"1.5GiB"', 3 * 2**29),
        ('"16 GB"', 16 * 10**9),
        ("17179869184", 2**34),
        ("2e9", 2 * 10**9),
    ],
)
def test_memory_has_units(written: str, size: int) -> None:
    assert parse_cluster(SMALL.replace('"16 GiB"', written)).kinds[0].memory_bytes == size


def test_presets_load_and_say_where_their_figures_come_from() -> None:
    assert {"hap-64", "hap-4", "3090+3060", "2xA6000+2x2080Ti", "8xA100+8xV100"} <= {*preset_names()}
    assert {"4xH100+4xA100+8xL4", "equal-8", "mixed-1024"} <= {*preset_names()}
    for name in preset_names():
        one = load_cluster(name)
        assert one.name == name
        assert one.about
        assert all(part.source for part in one.kinds)
        assert parse_cluster(one.text()) == one


def test_hap_figures() -> None:
    one = load_cluster("hap-64")
    assert [(part.name, part.devices, part.count, part.flops("f32")) for part in one.kinds] == [
        ("v100", 16, 8, 3.858755e12),
        ("p100", 48, 8, 2.149251e12),
    ]
    assert one.between.bytes_per_s * 8 == 10.4e9
    assert {(collective, way): link.bytes_per_s for collective, way, link in one.collectives} == {
        ("all_gather", "padded"): 815_418_707,
        ("all_gather", "grouped"): 549_828_906,
        ("all_reduce", "ring"): 476_774_816,
        ("reduce_scatter", "padded"): 876_490_907,
        ("reduce_scatter", "grouped"): 512_358_434,
        ("all_to_all", "direct"): 7_504_501_871,
    }
    one = load_cluster("hap-4")
    assert [(part.devices, part.flops("f32")) for part in one.kinds] == [(2, 5.712e12), (2, 3.010e12)]
    assert {(collective, way): link.bytes_per_s for collective, way, link in one.collectives} == {
        ("all_gather", "padded"): 2.912e9,
        ("all_gather", "grouped"): 1.823e9,
        ("all_reduce", "ring"): 1.592e9,
        ("reduce_scatter", "padded"): 2.698e9,
        ("reduce_scatter", "grouped"): 2.032e9,
        ("all_to_all", "direct"): 7.881e9,
    }


def test_mixed_1024() -> None:
    one = load_cluster("mixed-1024")
    assert (one.devices, one.nodes, len(one.kinds), one.node_sizes) == (1024, 128, 4, (8,))


def test_a_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    assert load_cluster(path) == load_cluster(str(path)) == parse_cluster(SMALL)


# Refusals


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("name =", "name", "not TOML"),
        ("name =", "x = " + "[" * 100_000 + "\nname =", "not TOML"),
        ('name = "small"', "", "name is missing"),
        ('"small"', "3", "name is 3"),
        ('"small"', '""', "name of a cluster"),
        ('"small"', '"\\u001b[31m"', "name of a cluster"),
        ('"small"', '"small"\nabout = 1', "about is 1"),
        ('"small"', '"small"\nabout = "\\u0007"', "about has characters"),
        ('"small"', '"small"\ndevises = 1', "'devises' is not known here"),
        ("[[devices]]", "[devices]", "devices is"),
        ('"v100"', '"a/b"', "name of a kind"),
        ('"v100"', '" v"', "name of a kind"),
        ('node = "box"', "", "node is missing"),
        ('"box"', '""', "name of a node"),
        ('"box"', '"box"\nnodes = 0', "nodes is 0"),
        ('"box"', '"box"\nnodes = 1.5', "nodes is 1.5"),
        ('"box"', '"box"\ncount = true', "count is True"),
        ('"box"', '"box"\ncount = -1', "count is -1"),
        ('"box"', '"box"\ncount = 1_000_000', "count is 1000000"),
        ('"box"', '"box"\ncount = 0x' + "f" * 9000, "count is too long a number"),
        ('"box"', '"box"\nsource = 1', "source is 1"),
        ("flops_per_s = 15.7e12\n", "", "flops_per_s is missing"),
        ("15.7e12", '"fast"', "flops_per_s is 'fast'"),
        ("15.7e12", "nan", "flops_per_s is nan"),
        ("15.7e12", "inf", "flops_per_s is inf"),
        ("15.7e12", "-1.0", "flops_per_s of f32 is -1.0"),
        ("15.7e12", "0x" + "f" * 9000, "flops_per_s is too long a number"),
        ("15.7e12", "{}", "flops_per_s is given for no dtype"),
        ("15.7e12", "{ fp32 = 1e12 }", "'fp32' is not known here"),
        ("15.7e12", "1e12\nefficiency = 2", "efficiency is 2.0"),
        ("900e9", "0", "bytes_per_s is 0.0"),
        ("900e9", "false", "bytes_per_s is False"),
        ("900e9", "1e9\nlaunch_s = -1e-6", "launch_s is -1e-06"),
        ("900e9", "1e9\ncrowding = 0.9", "contention is 0.9"),
        ("900e9", "1e9\ncrowding = 101", "contention is 101.0"),
        ("900e9", "1e9\ncrowding = nan", "contention is nan"),
        ("900e9", "1e9\ncrowding = true", "contention is True"),
        ("900e9", "1e9\ncrowding = [2]", r"contention is \[2\]"),
        ('"16 GiB"', '"16 gigs"', "memory is '16 gigs'"),
        ('"16 GiB"', '"16 kiB"', "memory is '16 kiB'"),
        ('"16 GiB"', '"99999999999 TiB"', "memory is"),
        ('"16 GiB"', "0", "memory is 0"),
        ('"16 GiB"', "1.5", "memory is 1.5"),
        ('"16 GiB"', "[]", r"memory is \[\]"),
        ('"16 GiB"', '"16 GiB"\nmeasured = 1', "measured is 1"),
        ("[links.within]", "[links]", "'latency_s' is not known here"),
        ("[links.within]", "[links.inside]", "'inside' is not known here"),
        (SMALL[SMALL.index("[links") :], "[links]\nwithin = 1", "within is 1"),
        (SMALL[SMALL.index("[[dev") :], 'links = 1\ndevices = [{ name = "x" }]', "node is missing"),
        ("latency_s = 1e-5", "", "latency_s is missing"),
        ("1e-5", "-1", "latency_s is -1.0"),
        ("12e9", "0.5", "bytes_per_s is 0.5"),
        ("12e9", "12e9\nspeed = 1", "'speed' is not known here"),
    ],
)
def test_what_cannot_be_used_is_refused(old: str, new: str, what: str) -> None:
    assert old in SMALL
    with pytest.raises(ClusterError, match=what) as refusal:
        parse_cluster(SMALL.replace(old, new, 1), "mine.toml")
    assert refusal.value.where.startswith("mine.toml")
    assert refusal.value.do


MEASURED = '[[devices.measured]]\ncall = "f()"\nforward = [[1.0, 2.0]]\n'


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (MEASURED.replace("call", "cell"), "'cell' is not known here"),
        (MEASURED.replace('"f()"', '""'), "needs a call and a time"),
        (MEASURED.replace("[[1.0, 2.0]]", "[]"), "needs a call and a time"),
        (MEASURED.replace("[[1.0, 2.0]]", "1"), "forward is 1"),
        (MEASURED.replace("[[1.0, 2.0]]", "[[1.0]]"), r"forward is \[1.0\]"),
        (MEASURED.replace("[[1.0, 2.0]]", "[1.0]"), "forward is 1.0"),
        (MEASURED.replace("2.0", "'x'"), "forward is 'x'"),
        (MEASURED.replace("2.0", "nan"), "forward is nan"),
        (MEASURED.replace("1.0", "1.5"), "a fraction is 1.5"),
        (MEASURED.replace("[1.0, 2.0]", "[1.0, 2.0], [1.0, 3.0]"), "measured twice"),
        (MEASURED + MEASURED, "a call was measured twice"),
    ],
)
def test_measurements_that_cannot_be_used_are_refused(more: str, what: str) -> None:
    with pytest.raises(ClusterError, match=what) as refusal:
        parse_cluster(SMALL.replace("[links.within]", more + "[links.within]"), "mine.toml")
    assert refusal.value.where.startswith("mine.toml, devices 1")
    assert refusal.value.do


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("collectives = 1\n", "collectives is 1"),
        ("[collectives.all_gather]\npaded = {}\n", "'paded' is not known here"),
        ("[collectives.allgather]\n", "'allgather' is not known here"),
        ("[collectives]\nall_gather = 1\n", "all_gather is 1"),
        ("[collectives.all_gather]\npadded = 1\n", "padded is 1"),
        ("[collectives.all_gather]\npadded = { latency_s = 1 }\n", "bytes_per_s is missing"),
        ("[collectives.all_gather]\npadded = { latency_s = 1, bytes_per_s = inf }\n", "bytes_per_s is inf"),
    ],
)
def test_collectives_that_cannot_be_used_are_refused(more: str, what: str) -> None:
    text = more + SMALL if more.startswith("collectives") else SMALL + more
    with pytest.raises(ClusterError, match=what) as refusal:
        parse_cluster(text, "mine.toml")
    assert refusal.value.do


def test_unknown_keys_are_guessed() -> None:
    with pytest.raises(ClusterError, match="did you mean memory") as refusal:
        parse_cluster(SMALL.replace("memory", "memry"), "mine.toml")
    assert refusal.value.where == "mine.toml, devices 1"
    with pytest.raises(ClusterError, match="did you mean padded"):
        parse_cluster(SMALL + "[collectives.all_gather]\npaded = {}\n")


def test_links_that_are_used_must_be_given() -> None:
    with pytest.raises(ClusterError, match="between is missing"):
        parse_cluster(SMALL.replace('"box"', '"box"\nnodes = 2'))
    with pytest.raises(ClusterError, match="within is missing"):
        parse_cluster(SMALL.replace('"box"', '"box"\ncount = 2').replace("within", "between"))
    with pytest.raises(ClusterError, match="links is missing"):
        parse_cluster(SMALL[: SMALL.index("[links")].replace('"box"', '"box"\ncount = 2'))
    with pytest.raises(ClusterError, match="within is missing"):
        parse_cluster(SMALL[: SMALL.index("[links")] + "[links]\n")
    lone = parse_cluster(SMALL.replace('"box"', '"box"\nnodes = 2').replace("within", "between"))
    assert lone.within == lone.between


def test_links_are_a_table() -> None:
    with pytest.raises(ClusterError, match="links is 1"):
        parse_cluster("links = 1\n" + SMALL[: SMALL.index("[links")])


def test_too_many_devices() -> None:
    with pytest.raises(ClusterError, match="120,000 devices are too many"):
        cluster(kind(nodes=60_000, count=2))
    assert cluster(kind(nodes=32_768, count=2)).devices == 65_536


def test_no_devices() -> None:
    with pytest.raises(ClusterError, match="no devices"):
        parse_cluster('name = "empty"')
    with pytest.raises(ClusterError, match="no devices"):
        cluster()


def test_nodes_that_do_not_fit_together() -> None:
    with pytest.raises(ClusterError, match="share node 'box' disagree"):
        cluster(kind(nodes=2), kind("t4", nodes=3))
    with pytest.raises(ClusterError, match="two nodes are called 'box-1'"):
        cluster(kind(nodes=2), kind("t4", "box-1"))


def test_clusters_made_by_hand_are_checked_too() -> None:
    link = Link(0, 1e9)
    with pytest.raises(ClusterError, match="'all_reduce' by 'padded' cannot be measured"):
        replace(cluster(kind()), collectives=(("all_reduce", "padded", link),))
    with pytest.raises(ClusterError, match="collective was measured twice"):
        replace(cluster(kind()), collectives=(("all_reduce", "ring", link),) * 2)
    with pytest.raises(ClusterError, match="flops_per_s is given for 'f32', 'f32'"):
        replace(kind(), flops_per_s=(("f32", 1.0), ("f32", 2.0)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no cluster 'hap64'.*\n.*did you mean hap-64"):
        load_cluster("hap64")
    for spec in (tmp_path, tmp_path / "none.toml", "a\0b", "x" * 10_000):
        with pytest.raises(ClusterError) as refusal:
            load_cluster(spec)
        assert refusal.value.do
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ClusterError, match="not a file"):
        load_cluster(tmp_path / "pipe.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(tmp_path / "latin.toml")
    with (tmp_path / "large.toml").open("wb") as large:
        large.truncate(2**30)
    with pytest.raises(ClusterError, match="larger than"):
        load_cluster(tmp_path / "large.toml")
