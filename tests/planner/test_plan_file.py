"""Plans as files: they load back to the same plan, edits are seen, and what is not a plan is refused in words."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.cluster.cluster_file import load_cluster
from lopsided.codec import check_writable
from lopsided.errors import PlanError
from lopsided.ir.placement import Shares
from lopsided.models.by_name import load
from lopsided.ops.derive import derive_rules
from lopsided.planner.plan_data import Breakdown
from lopsided.planner.plan_file import EDITED, FORMAT, PLAN_FILE, VERSION, load_plan, parse_plan, plan_text, save_plan
from lopsided.planner.planner import plan, predict
from lopsided.verification.verifier import random_program
from tests.support.data import paths
from tests.support.plans import DATA_PARALLEL, SHARES, ZERO, graph, plan_of

# Round trips


@pytest.mark.parametrize("text", [DATA_PARALLEL, ZERO])
@pytest.mark.parametrize("regather", [False, True])
def test_a_plan_loads_back_to_itself(text: str, regather: bool) -> None:
    saved = plan_of(text, regather=regather)
    written = plan_text(saved)
    assert parse_plan(written) == saved
    assert plan_text(parse_plan(written)) == written


def test_a_plan_of_the_planner_loads_back(tmp_path: Path) -> None:
    module, batch = load("bert:layers=2,width=64,heads=2,vocab=97,seq=16,batch=8")
    made = plan(module, batch, "2xA6000+2x2080Ti")
    save_plan(made, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made


def test_a_part_of_a_cluster_is_kept() -> None:
    whole = load_cluster("hap-64")
    program = plan_of().program
    for on in (whole.only([0]), whole.without_device("p100-box-3/p100-2"), whole.without_node("v100-box-1")):
        shares = Shares((1 / on.devices,) * on.devices)
        step_s, breakdown, memory = predict(program, shares, on, "adamw", False)
        part = replace(
            plan_of(), cluster=whole, on=on, shares=shares, step_s=step_s, breakdown=breakdown, memory_bytes=memory
        )
        part = replace(part, without_device=(), without_node=(("v100-box-1", 0.5),))
        assert parse_plan(plan_text(part)) == part


seconds = st.floats(0, 1e9)


@st.composite
def many_shares(draw: st.DrawFn) -> Shares:
    def fractions() -> tuple[float, ...]:
        raw = draw(st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
        return tuple(x / sum(raw) for x in raw)

    names = draw(st.lists(st.sampled_from(["state", "segment1", "a_b"]), unique=True))
    cuts = []
    for name, length in draw(st.lists(st.tuples(st.sampled_from(["", *names]), st.integers(0, 99)), unique=True)):
        first = draw(st.integers(0, length))
        second = draw(st.integers(0, length - first))
        cuts.append((name, length, (first, second, length - first - second)))
    return Shares(fractions(), tuple((name, fractions()) for name in names), tuple(cuts))


@given(many_shares(), st.integers(0, 10**6), st.lists(seconds, min_size=6, max_size=6), st.text(max_size=20))
@settings(max_examples=40)
def test_any_plan_loads_back(shares: Shares, seed: int, numbers: list[float], note: str) -> None:
    program = random_program(derive_rules(graph()), random.Random(seed))
    note = "".join(c for c in note if c.isprintable())
    made = replace(
        plan_of(),
        program=program,
        shares=shares,
        step_s=numbers[0],
        breakdown=Breakdown(*numbers),
        notes=(note,),
        memory_bytes=(seed, 0, 2**40),
    )
    assert parse_plan(plan_text(made)) == made


def test_a_file_can_be_read() -> None:
    told = json.loads(plan_text(plan_of()))
    assert told["format"] == FORMAT
    assert told["version"] == VERSION
    assert told["program"] == DATA_PARALLEL.splitlines()
    assert told["shares"] == {"work": [0.5, 0.25, 0.25], "state": [0.2, 0.4, 0.4]}
    assert told["devices"] == ["box/big-1", "box/small-1", "box/small-2"]
    assert told["without_device"]["box/small-2"] is None
    assert max(map(len, plan_text(plan_of()).splitlines())) < 250


# Edits


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    told = json.loads(plan_text(plan_of()))
    change(told)
    return json.dumps(told)


def store_cut(told: dict[str, Any]) -> None:
    told["program"] = ZERO.splitlines()


def share_otherwise(told: dict[str, Any]) -> None:
    told["shares"]["work"], told["cuts"] = [0.1, 0.45, 0.45], []


def gather_again(told: dict[str, Any]) -> None:
    told["program"], told["regather"] = ZERO.splitlines(), True


@pytest.mark.parametrize(
    ("change", "words"),
    [(store_cut, "program"), (share_otherwise, "shares, cuts"), (gather_again, "program, regather")],
)
def test_an_edit_is_predicted_anew_and_noted(change: Callable[[dict[str, Any]], None], words: str) -> None:
    before = plan_of()
    plan = parse_plan(edited(change))
    expected = predict(plan.program, plan.shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes)
    assert (plan.step_s, plan.breakdown, plan.memory_bytes) == expected
    assert (plan.step_s, plan.memory_bytes) != (before.step_s, before.memory_bytes)
    assert plan.notes[0] == before.notes[0]
    assert plan.notes[-1].startswith(f"{EDITED}: {words};")
    assert plan.search.why == EDITED
    assert parse_plan(plan_text(plan)) == plan


def test_how_much_is_sent_at_a_time_is_read_and_may_be_edited() -> None:
    small = replace(plan_of(), bucket_bytes=2**20)
    step_s, breakdown, memory = predict(small.program, small.shares, small.on, small.optimizer, False, 2**20)
    small = replace(small, step_s=step_s, breakdown=breakdown, memory_bytes=memory)
    assert parse_plan(plan_text(small)) == small
    plan = parse_plan(edited(put("bucket_bytes", value=2**20)))
    assert (plan.bucket_bytes, plan.step_s) == (2**20, step_s)
    assert any("bucket_bytes" in note for note in plan.notes)


def test_a_plan_that_does_not_say_how_much_is_sent_at_a_time_sends_what_everyone_does() -> None:
    def forget(told: dict[str, Any]) -> None:
        del told["bucket_bytes"], told["prediction_of"]["bucket_bytes"]

    assert parse_plan(edited(forget)) == plan_of()


def test_cuts_give_way_to_shares_that_were_edited() -> None:
    plan = parse_plan(edited(put("shares", "work", value=[0.1, 0.45, 0.45])))
    assert plan.shares.cuts == ()
    assert plan.shares.cut(70) == (7, 32, 31)
    assert (
        plan.step_s == predict(plan.program, plan.shares, plan.on, plan.optimizer, plan.regather, plan.bucket_bytes)[0]
    )
    assert any(note.startswith(f"{EDITED}: shares;") for note in plan.notes)
    assert any("cuts in the file were made for other shares and are dropped" in note for note in plan.notes)
    assert parse_plan(plan_text(plan)) == plan


def test_cuts_that_were_edited_stay() -> None:
    cuts = [{"shares": "work", "length": 70, "pieces": [10, 30, 30]}]
    for change in (put("cuts", value=cuts), lambda told: told.update(cuts=cuts) or told["shares"].update(work=WORK)):
        plan = parse_plan(edited(change))
        assert plan.shares.cut(70) == (10, 30, 30)
        assert not any("dropped" in note for note in plan.notes)


WORK = [0.2, 0.4, 0.4]
FIGURES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": lambda told: told.update(step_s=1e-6),
    "breakdown": lambda told: told["breakdown"].update(compute_s=1e-6),
    "memory": lambda told: told.update(memory_bytes=[1, 2, 3]),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_that_were_edited_are_predicted_anew(figure: str) -> None:
    before, plan = plan_of(), parse_plan(edited(FIGURES[figure]))
    assert (plan.step_s, plan.breakdown, plan.memory_bytes) == (before.step_s, before.breakdown, before.memory_bytes)
    assert plan.notes[-1].startswith(f"{EDITED}: step time, breakdown or memory")
    assert plan.search == before.search  # the program is still the one that was found
    assert parse_plan(plan_text(plan)) == plan


COMPARISONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "baseline": lambda told: told["baselines"][0].update(step_s=5.0),
    "without": lambda told: told["without_device"].update({"box/small-2": 1.0}),
    "search": lambda told: told["search"].update(gap=0.5),
}


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparisons_that_were_edited_are_said_to_be_the_files(comparison: str) -> None:
    before, plan = plan_of(), parse_plan(edited(COMPARISONS[comparison]))
    assert (plan.step_s, plan.memory_bytes) == (before.step_s, before.memory_bytes)
    assert "are as the file has them" in plan.notes[-1]
    assert len(plan.notes) == len(before.notes) + 1


def test_another_optimizer_needs_other_memory() -> None:
    plan = parse_plan(edited(lambda told: told.update(optimizer="sgd")))
    assert max(plan.memory_bytes) < max(plan_of().memory_bytes)
    assert "optimizer" in plan.notes[-1]


def test_spaces_are_no_edit() -> None:
    indented = edited(lambda told: told.update(program=["   " + line for line in told["program"]] + [""]))
    assert parse_plan(indented) == plan_of()


def test_the_prediction_can_be_another_one() -> None:
    breakdown = Breakdown(1, 2, 3, 4, 5, 6)
    plan = parse_plan(edited(store_cut), predict=lambda *_: (21.0, breakdown, (2**50, 1, 2)))
    assert (plan.step_s, plan.breakdown, plan.memory_bytes) == (21.0, breakdown, (2**50, 1, 2))
    assert "it does not fit: big needs" in plan.notes[-1]


def test_notes_of_edits_do_not_pile_up() -> None:
    once = json.loads(plan_text(parse_plan(edited(store_cut))))
    once["regather"] = True
    twice = parse_plan(json.dumps(once))
    assert sum(note.startswith(EDITED) for note in twice.notes) == 1
    assert "regather" in twice.notes[-1]


# Refusals


def at(line: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        k = next(k for k, text in enumerate(told["program"]) if text.startswith(line))
        assert old in told["program"][k]
        told["program"][k] = told["program"][k].replace(old, new)

    return change


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        for part in path[:-1]:
            told = told[part]  # type: ignore[index]
        told[path[-1]] = value  # type: ignore[index]

    return change


def without(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        for part in path[:-1]:
            told = told[part]  # type: ignore[index]
        del told[path[-1]]  # type: ignore[arg-type]

    return change


def change_text(key: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        told[key] = "\n".join(told[key]).replace(old, new).split("\n")

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "a rule that is none": (at("%relu", ": S0)", ": S1)"), ("aten.relu.default has no rule", "line 8", "S0 → S0")),
    "a store that is none": (at("%up_weight", ": I", ": S2"), ("up_weight", "line 1", "choose one of I, S0, S1")),
    "a copy that is not there": (at("%relu", "%linear: S0", "%linear: S1→S0"), ("not available as S1", "line 8")),
    "a placement that is none": (at("%relu", ": S0", ": Q0"), ("'Q0' is not a placement", "line 8")),
    "a line that is none": (put("program", 2, value="down = up"), ("does not parse", "line 3")),
    "shares nobody has": (at("%up_weight", ": I", ": S0@stat"), ("%up_weight", "not available as I")),
    "a node left out": (without("program", 7), ("%relu",)),
    "an edited graph": (change_text("graph", "relu.default", "tanh.default"), ("fingerprint", "graph")),
    "a graph that is none": (put("graph", 6, value="%linear ="), ("graph", "does not parse")),
    "a foreign op": (change_text("graph", "aten.relu.default", "mine.relu.default"), ("mine.relu",)),
    "an edited cluster": (change_text("cluster", "8 GiB", "9 GiB"), ("fingerprint", "devices")),
    "an edited part": (change_text("on", "8 GiB", "9 GiB"), ("fingerprint", '"on"')),
    "a cluster that is none": (put("cluster", value=["name ="]), ("TOML",)),
    "another cluster's part": (change_text("on", '"big"', '"huge"'), ("box/huge-1", "does not have")),
    "renamed devices": (put("devices", 0, value="mine"), ("devices", "in their order")),
    "shares that do not sum": (put("shares", "work", value=[0.5, 0.2, 0.2]), ("sum to 0.9",)),
    "a share that is negative": (put("shares", "state", value=[1.0, 0.5, -0.5]), ("-0.5",)),
    "shares for other devices": (put("shares", "work", value=[0.5, 0.5]), ("2 shares for 3 devices",)),
    "state shares for other devices": (put("shares", "state", value=[0.5, 0.5]), ("2 shares 'state' for 3",)),
    "shares with a strange name": (put("shares", "a b", value=[1.0, 0.0, 0.0]), ("'a b'",)),
    "a cut that does not sum": (put("cuts", 0, "pieces", value=[36, 17, 16]), ("cut of 70", "sum to 70")),
    "a cut given twice": (lambda told: told["cuts"].append(told["cuts"][0]), ("given twice",)),
    "an optimizer": (put("optimizer", value="adamv"), ("adamv", "adamw")),
    "a negative time": (put("step_s", value=-1.0), ("step_s", "-1.0")),
    "no time": (put("step_s", value=None), ("step_s",)),
    "a time in words": (put("breakdown", "compute_s", value="long"), ("compute_s", "'long'")),
    "true as a number": (put("breakdown", "compute_s", value=True), ("compute_s", "True")),
    "half a byte": (put("memory_bytes", 0, value=0.5), ("memory_bytes", "0.5")),
    "too little memory": (put("memory_bytes", value=[1]), ("memory_bytes", "3 devices")),
    "an enormous number": (put("search", "states", value=10**30), ("states",)),
    "a key too many": (put("extra", value=1), ("'extra'", "known are")),
    "a key too few": (without("search"), ('"search" is missing',)),
    "an inner key too many": (put("search", "speed", value=1), ("'speed'", "known are")),
    "an inner key too few": (without("baselines", 0, "fits"), ('"fits" is missing', '"baselines" 1')),
    "a list in place of an object": (put("search", value=[]), ("search", "object")),
    "an object in place of a list": (put("program", value={}), ("program", "list")),
    "a number in place of a line": (put("program", 0, value=3), ("program", "lines")),
    "a device that is not there": (put("without_device", "box/big-9", value=1.0), ("box/big-9",)),
    "a cursor that moves": (put("notes", value=["\x1b[2J"]), ("notes", "one line")),
    "an endless note": (put("notes", value=["x" * 20_000]), ("notes", "one line")),
    "too much at a time": (put("bucket_bytes", value=2**30), ('"bucket_bytes"', "26,214,400")),
    "nothing at a time": (put("bucket_bytes", value=0), ('"bucket_bytes"',)),
    "a newer version": (put("version", value=VERSION + 1), ("made by a newer lopsided",)),
    "an older version": (put("version", value=0), ("no version 0",)),
    "another format": (put("format", value="zip"), ("not a plan",)),
    "a prediction of nothing": (put("prediction_of", value={}), ('"program" is missing',)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_plan_is_refused_in_words(case: str) -> None:
    change, words = BAD[case]
    with pytest.raises(PlanError) as caught:
        parse_plan(edited(change), "mine.json")
    for word in words:
        assert word in str(caught.value)
    assert "mine.json" in caught.value.where
    assert caught.value.do


def test_a_slip_in_the_name_of_shares_is_refused() -> None:
    text = ZERO.replace("@state", "@stat")
    with pytest.raises(PlanError, match="no shares 'stat'") as caught:
        parse_plan(edited(lambda told: told.update(program=text.splitlines())))
    assert "use one of state" in caught.value.do


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a plan"),
        ("3", "not a plan"),
        ("[" * 100_000, "nest too deep"),
        ('{"a":' * 100_000, "nest too deep"),
        ('{"format": ' + "9" * 10_000 + "}", "too many digits"),
        ('{"format": "lopsided-plan", "format": "x"}', "given twice"),
        ('{"format": NaN}', "NaN"),
        ('{"format": -Infinity}', "Infinity"),
    ],
)
def test_texts_that_are_none(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan(text)


def test_numbers_that_overflow_are_refused() -> None:
    with pytest.raises(PlanError, match="step_s"):
        parse_plan(edited(lambda told: None).replace('"step_s": ', '"step_s": 1e999, "x": ', 1))


TOLD: dict[str, Any] = json.loads(plan_text(plan_of()))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(paths(TOLD)), ANY)
@settings(max_examples=300)
def test_any_change_is_loaded_or_refused(path: tuple[str | int, ...], value: object) -> None:
    told = copy.deepcopy(TOLD)
    put(*path, value=value)(told)
    try:
        plan = parse_plan(json.dumps(told))
    except PlanError:
        return
    assert parse_plan(plan_text(plan)) == plan


# Files


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nowhere.json", "no such file"),
        (tmp_path, "this is a directory"),
        (Path("/dev/zero"), "this is not a plain file"),
    ):
        with pytest.raises(PlanError, match=words):
            load_plan(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "binary.json")
    with pytest.raises(PlanError, match="cannot be written"):
        save_plan(plan_of(), tmp_path / "no" / "folder.json")


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("")
    check_writable(tmp_path / "there.json", PLAN_FILE)
    check_writable(tmp_path / "new.json", PLAN_FILE)
    save_plan(plan_of(), tmp_path / "before.json")
    check_writable(tmp_path / "before.json", PLAN_FILE)
    check_writable("/dev/null", PLAN_FILE)
    for path, words in (
        (tmp_path, "this is a directory"),
        (tmp_path / "no" / "plan.json", "no folder"),
        (tmp_path / "there.json" / "plan.json", "no folder"),
    ):
        with pytest.raises(PlanError, match=words) as caught:
            check_writable(path, PLAN_FILE)
        assert caught.value.do
    (tmp_path / "there.json").chmod(0o400)
    if not os.access(tmp_path / "there.json", os.W_OK):  # root may write everywhere
        with pytest.raises(PlanError, match="not allowed"):
            check_writable(tmp_path / "there.json", PLAN_FILE)


def test_a_full_disk_is_told_in_words() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")  # Linux has it, others need not
    with pytest.raises(PlanError, match="No space left"):
        save_plan(plan_of(), "/dev/full")


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopsided.codec.MOST_BYTES_OF_A_FILE", 1000)
    save_plan(plan_of(), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="larger than 1,000 bytes"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="longer than 1,000"):
        parse_plan(plan_text(plan_of()))


@pytest.mark.parametrize("name", ["work", ""])
def test_shares_whose_name_is_taken_are_not_written(name: str) -> None:
    with pytest.raises(PlanError, match="shares are called"):
        plan_text(replace(plan_of(), shares=Shares(SHARES.work, ((name, SHARES.work),))))
