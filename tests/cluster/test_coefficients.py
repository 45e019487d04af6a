"""The table of coefficients is the whole truth: every measured number has a row, and counts where its row says."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path

import pytest

import lopsided
from lopsided.cluster.cluster import Cluster
from lopsided.cluster.cluster_file import parse_cluster
from lopsided.cluster.coefficients import CLUSTER, COEFFICIENTS, KIND, LINK, Coefficient, coefficient, optional
from lopsided.cluster.devices import Kind, Link
from lopsided.errors import ClusterError

ROOT = Path(lopsided.__file__).parent
OWNERS = {KIND: Kind, LINK: Link, CLUSTER: Cluster}
CARRIERS = ("cluster", "profiling", "calibration", "report", "cli", "demo")
"""Packages that hand coefficients on, print them or correct them; all others price with them."""

every = pytest.mark.parametrize("one", COEFFICIENTS, ids=lambda one: f"{one.owner}.{one.name}")


def made() -> Cluster:
    kind = Kind("gpu", "box", 1, 2, (("f32", 1e12),), 1e11, 2**34, 1e-6)
    collectives = (("all_gather", "padded", Link(2e-5, 1e9, 0.25)),)
    return Cluster("two", "", (kind,), Link(2e-5, 1e9), Link(1e-4, 1e8), collectives)


def changed(one: Coefficient, number: float) -> Cluster:
    """A cluster that has this number for this coefficient."""
    cluster = made()
    value = (("f32", number),) if one.name == "flops_per_s" else number
    if one.owner == KIND:
        return replace(cluster, kinds=(replace(cluster.kinds[0], **{one.name: value}),))
    if one.owner == LINK:
        link = replace(cluster.collectives[0][2], **{one.name: value})
        return replace(cluster, collectives=(("all_gather", "padded", link),))
    return replace(cluster, **{one.name: value})


@cache
def names_in(module: str) -> frozenset[str]:
    """Attributes, keywords and words that a module uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def test_every_number_of_the_types_has_a_row() -> None:
    for owner, kept in OWNERS.items():
        numbers = {field.name for field in fields(kept) if "float" in str(field.type)}
        assert numbers == {one.name for one in COEFFICIENTS if one.owner == owner}


def test_a_coefficient_has_one_row() -> None:
    assert len({(one.owner, one.name) for one in COEFFICIENTS}) == len(COEFFICIENTS)
    assert coefficient(CLUSTER, "packing").unit == "times"


@every
def test_the_field_has_the_default_of_its_row(one: Coefficient) -> None:
    field = next(field for field in fields(OWNERS[one.owner]) if field.name == one.name)
    assert field.default == (one.default if one.default is not None or one.name == "skew" else MISSING)


@every
def test_it_counts_and_is_measured_where_its_row_says(one: Coefficient) -> None:
    assert one.measured_by
    assert one.counts_in
    for module in (*one.measured_by, *one.counts_in):
        assert one.name in names_in(module), f"lopsided/{module}.py does not know {one.name}"


@pytest.mark.parametrize("one", [*optional(KIND), *optional(CLUSTER)], ids=lambda one: one.name)
def test_it_counts_nowhere_else(one: Coefficient) -> None:
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        if module.split("/")[0] in CARRIERS or module in one.counts_in:
            continue
        used = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        # `Costs.packing` is seconds a byte, made of the coefficient.
        read = {node.attr for node in used if ast.unparse(node.value) != "costs"}
        assert one.name not in read, f"lopsided/{module}.py uses {one.name}"


@every
@pytest.mark.parametrize("beyond", [math.nan, math.inf, -math.inf])
def test_numbers_out_of_bounds_are_refused(one: Coefficient, beyond: float) -> None:
    with pytest.raises(ClusterError, match=f"{one.name}.* is "):
        changed(one, beyond)
    for bound in (one.low, one.high):
        changed(one, bound)
    between = f"between {one.low:,g} and {one.high:,g}"
    for bound in (one.low - 1e-3, one.high * 1.001):
        with pytest.raises(ClusterError, match=rf"(?s){one.name}.*{re.escape(between)}"):
            changed(one, bound)
        assert one.low <= one.clamp(bound) <= one.high


@every
def test_it_prints_loads_back_and_makes_another_fingerprint(one: Coefficient) -> None:
    cluster = changed(one, one.example)
    assert f"{one.name} = " in cluster.text()
    assert parse_cluster(cluster.text()) == cluster
    assert cluster.fingerprint != made().fingerprint


@pytest.mark.parametrize("one", [*optional(KIND), *optional(CLUSTER)], ids=lambda one: one.name)
def test_what_nobody_measured_is_not_printed(one: Coefficient) -> None:
    assert f"{one.name} = " not in made().text()


@pytest.mark.parametrize(
    ("old", "new"), [("drag", "compute_slowdown"), ("crowding", "contention"), ("stretch", "comm_slowdown")]
)
def test_files_with_a_name_of_before_still_load(old: str, new: str) -> None:
    one = next(one for one in COEFFICIENTS if one.name == new)
    cluster = changed(one, one.example)
    text = cluster.text()
    assert text.count(f"{new} = ") == 1
    assert parse_cluster(text.replace(f"{new} = ", f"{old} = ")) == cluster
    both = text.replace(f"{new} = ", f"{old} = 1.0\n{new} = ")
    with pytest.raises(ClusterError, match=f"{new} is given as '{old}' too"):
        parse_cluster(both)
