"""Files go through one codec: what is declared comes back, all else is refused in words; older files still load."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.calibration.run_record import DeviceRun, Run, Span, StepRun, load_run, parse_run, run_text
from lopsided.cluster.cluster import MEASURABLE, Cluster, Kind, Link, Measured
from lopsided.cluster.cluster_file import load_cluster, parse_cluster
from lopsided.codec import FileKind, Fraction, Key, Line, Place, SecondsOrInf, Whole, encode, parse_json, parse_toml
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import CheckpointError, ClusterError, LopsidedError, PlanError
from lopsided.planner.plan_file import EDITED, load_plan, parse_plan, plan_text
from lopsided.runtime.checkpoint.checkpoint import load
from lopsided.runtime.checkpoint.folder import as_plain, from_plain, read_table, read_training, write_file
from lopsided.runtime.checkpoint.state import full_state_dict
from tests.support.data import paths
from tests.support.held_pieces import THREE, ByHand, make_optimizer, trained_whole
from tests.support.plans import ZERO, plan_of

OLDER = Path(__file__).parent / "older_files"  # written by the release before the codec, format version 1

# Types


@dataclass(frozen=True, slots=True)
class Part:
    name: Line
    share: Fraction = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    format: str = "sample"
    version: int = 3
    count: Annotated[int, Key(least=1, most=9)]
    step_s: SecondsOrInf = math.inf
    slowdown: Annotated[float, Key(was=("drag", "delay"))] = 0.5
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, tuple[Whole, ...]]
    way: Literal["ring", "direct"] = "ring"
    first: Part | None = None
    rest: object = None

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ClusterError("7 is taken", where="a sample", do="take another number")


KIND = FileKind(PlanError, "sample", "a test writes one", format="sample", version=3)
GOOD: dict[str, Any] = {"format": "sample", "version": 3, "count": 2, "by_name": {"a": [1, 2]}}


def parsed(**changes: object) -> Sample:
    return parse_json(Sample, json.dumps(GOOD | changes), Place(KIND, "x.json"))


def test_what_is_declared_comes_back() -> None:
    parts = (Part("one"), Part("two", 0.25))
    sample = Sample(
        count=3, parts=parts, pair=(4, "x"), by_name={"b": (0, 2**62)}, first=parts[1], rest=[1, {"a": None}]
    )
    assert encode(sample)["step_s"] is None
    assert parse_json(Sample, json.dumps(encode(sample)), Place(KIND, "x.json")) == sample


def test_keys_of_earlier_versions_are_read() -> None:
    assert parsed(drag=0.75) == parsed(delay=0.75) == parsed(slowdown=0.75)
    assert "drag" not in encode(parsed(drag=0.75))
    with pytest.raises(PlanError, match=r"\"slowdown\" is given as 'drag' too, its earlier name"):
        parsed(drag=0.75, slowdown=0.75)
    with pytest.raises(PlanError, match="\"slowdown\" is 'x'"):
        parsed(delay="x")


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"count": 0}, '"count" is 0\n', "x.json"),
        ({"count": 10**5000}, "too many digits", "x.json"),
        ({"count": True}, '"count" is True', "x.json"),
        ({"count": 1.0}, '"count" is 1.0', "x.json"),
        ({"count": 7}, "7 is taken", "x.json"),
        ({"step_s": -1}, '"step_s" is -1.0', "x.json"),
        ({"step_s": 10**400}, '"step_s" is 1', "x.json"),
        ({"slowdown": None}, '"slowdown" is None', "x.json"),
        ({"parts": {}}, '"parts" is {}', "x.json"),
        ({"parts": [3]}, '"parts" 1 is 3', "x.json"),
        ({"parts": [{"name": "a"}, {"name": "b", "share": 2}]}, '"share" is 2.0', "x.json, \"parts\" 2 ('b')"),
        ({"parts": [{"name": "\x1b[2J"}]}, "\"name\" is '\\x1b[2J'", "x.json, \"parts\" 1 ('\\x1b[2J')"),
        ({"parts": [{}]}, '"name" is missing', 'x.json, "parts" 1'),
        ({"pair": [1]}, '"pair" is [1]', "x.json"),
        ({"pair": ["1", 1]}, "\"pair\" is '1'", "x.json"),
        ({"by_name": {"a\n": [-1]}}, "'a\\n' is -1", 'x.json, "by_name"'),
        ({"way": "tree"}, "\"way\" is 'tree'", "x.json"),
        ({"way": []}, '"way" is []', "x.json"),
        ({"first": 1}, '"first" is 1', "x.json"),
        ({"first": {"name": "a", "nome": 1}}, "'nome' is not known here", 'x.json, "first"'),
        ({"y" * 500: 1}, "'yyy", "x.json"),
        ({"format": "other"}, "this is not a sample", "x.json"),
        ({"version": 2}, "no version 2 of the format\n", "x.json"),
        ({"version": 4}, "made by a newer lopsided", "x.json"),
        ({"version": "3"}, "\"version\" is '3'", "x.json"),
    ],
)
def test_what_is_not_declared_is_refused(changes: dict[str, object], what: str, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        parsed(**changes) if 10**5000 not in changes.values() else parse_json(
            Sample, '{"count": 1' + "0" * 5000 + "}", Place(KIND, "x.json")
        )
    assert what in f"{caught.value}"
    assert caught.value.where == where
    assert caught.value.do
    assert len(caught.value.what) < 200


def test_a_guess_at_a_key() -> None:
    with pytest.raises(PlanError, match="did you mean by_name"):
        parsed(by_nane={})


def test_toml_goes_the_same_way() -> None:
    kind = replace(KIND, toml=True)
    text = 'count = 2\n[by_name]\na = [1]\n[[parts]]\nname = "x"\n'
    assert parse_toml(Sample, text, Place(kind, "x.toml")).parts == (Part("x"),)
    with pytest.raises(PlanError, match="share is nan"):
        parse_toml(Sample, text + "share = nan\n", Place(kind, "x.toml"))
    # Which would take gigabytes to read.
    with pytest.raises(PlanError, match="line 6 has more than 1,000 dots"):
        parse_toml(Sample, text + "a." * 25_000 + "a = 1\n", Place(kind, "x.toml"))


# Round trips of every kind of file; those of plans are in planner/test_plan_file.py

times = st.floats(0, 1000).map(lambda x: round(x, 7))
names = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8)


@st.composite
def links(draw: st.DrawFn, *, skewed: bool = False) -> Link:
    skew = draw(st.none() | st.floats(0, 1)) if skewed else None
    return Link(draw(st.floats(0, 3600)), draw(st.floats(1, 1e18)), skew)


@st.composite
def kinds(draw: st.DrawFn, node: str) -> Kind:
    def points() -> tuple[tuple[float, float], ...]:
        fractions = draw(st.lists(st.floats(0, 1), min_size=1, max_size=3, unique=True))
        return tuple((fraction, draw(st.floats(0, 1e6))) for fraction in fractions)

    calls = draw(st.lists(names, max_size=2, unique=True))
    dtypes = draw(st.lists(st.sampled_from(["f64", "f32", "bf16", "f16"]), min_size=1, unique=True))
    return Kind(
        draw(names),
        node,
        1,
        draw(st.integers(1, 9)),
        tuple((dtype, draw(st.floats(1, 1e24))) for dtype in dtypes),
        draw(st.floats(1, 1e18)),
        draw(st.integers(1, 2**60)),
        draw(st.floats(0, 3600)),
        draw(st.text(st.characters(categories=("L", "P", "Zs")), max_size=9).filter(str.isprintable)),
        tuple(Measured(call, points(), points() if draw(st.booleans()) else ()) for call in calls),
        draw(st.floats(0, 1)),
        draw(st.floats(0, 3600)),
        draw(st.floats(1, 100)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    measured = [(collective, way) for collective, ways in MEASURABLE.items() for way in ways]
    chosen = draw(st.lists(st.sampled_from(measured), unique=True))
    pairs = ((nodes[0], nodes[1], draw(links())),) if len(nodes) > 1 else ()
    return Cluster(
        draw(names),
        draw(names) + "\n",
        tuple(draw(kinds(node)) for node in nodes),
        draw(links()),
        draw(links()),
        tuple((collective, way, draw(links(skewed=True))) for collective, way in chosen),
        pairs,
        draw(st.floats(0.1, 100)),
        draw(st.floats(1, 1e6)),
    )


@given(clusters())
def test_any_cluster_loads_back(cluster: Cluster) -> None:
    assert parse_cluster(cluster.text()) == cluster
    assert parse_cluster(cluster.text()).text() == cluster.text()


@given(
    st.lists(times, min_size=1, max_size=3), st.lists(st.tuples(times, times, names), max_size=3), st.integers(0, 2**62)
)
@settings(max_examples=30)
def test_any_run_loads_back(timed: list[float], recorded: list[tuple[float, float, str]], peak: int) -> None:
    plan = plan_of()
    spans = tuple(
        Span("network", f"{what} and more", start, round(start + took, 7), "all_gather", "padded", peak % 10**9, 1.5)
        for start, took, what in recorded
    )
    steps = (*map(StepRun, timed), StepRun(1.0, spans))
    run = Run("model", "2.13", plan, tuple(DeviceRun(name, "box", peak, steps) for name in plan.devices))
    assert parse_run(run_text(run)) == run


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.just("~"), inner)
    ),
    max_leaves=8,
)


@given(plain)
def test_any_plain_value_loads_back(value: object) -> None:
    text = json.dumps(as_plain(value, "here"), allow_nan=False)
    assert from_plain(json.loads(text)) == value
    assert repr(from_plain(json.loads(text))) == repr(value)  # True is not 1, and 1 is not 1.0


# Strangers: every kind of file, changed in one place

STEP = OLDER / "checkpoint" / "step-00000002"


def _parsed_table(text: str) -> object:
    return _parsed_beside(text, "metadata.json", read_table)


def _parsed_training(text: str) -> object:
    training: Any = _parsed_beside(text, "training.json", read_training)
    told = [training.loader, training.scheduler and training.scheduler.state]
    return [training, *map(from_plain, told)]


def _parsed_beside(text: str, name: str, read: Callable[[Path], object]) -> object:
    folder = SCRATCH / name
    if not folder.exists():
        shutil.copytree(STEP, folder)
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return read(folder)


SCRATCH = Path()


@pytest.fixture(autouse=True, scope="module")
def _scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    global SCRATCH
    SCRATCH = tmp_path_factory.mktemp("strangers")


JSON_FILES: dict[str, tuple[Path, Callable[[str], object]]] = {
    "plan": (OLDER / "plan_measured.json", parse_plan),
    "run": (OLDER / "run.json", parse_run),
    "table": (STEP / "metadata.json", _parsed_table),
    "training": (STEP / "training.json", _parsed_training),
}


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**63,
        10**40,
        -(10**400),
        0.5,
        1e300,
        -0.0,
        "",
        "x",
        "\x1b[31m",
        "\ud800",
        "../../x",
    ),
    *([], [None], [[]], {}, {"a": 1}, {"~": "code", "of": []}, {"name": "\n"}, _deep(60), _deep(400)),
]


def changed(told: Any, path: tuple[str | int, ...], how: str, value: object) -> Any:
    told = copy.deepcopy(told)
    into = told
    for part in path[:-1]:
        into = into[part]
    if how == "drop":
        del into[path[-1]]
    elif how == "more" and isinstance(into, dict):
        into[f"{path[-1]}s"] = value
    else:
        into[path[-1]] = value
    return told


def check_refusal(parse: Callable[[str], object], text: str) -> None:
    """Either the text can be read, or it is refused in short words."""
    refusal: LopsidedError | None = None
    try:
        parse(text)
    except LopsidedError as error:
        refusal = error
    assert refusal is None or refusal.do
    assert refusal is None or len(refusal.what) < 400


@pytest.mark.parametrize("kind", JSON_FILES)
@given(data=st.data())
@settings(max_examples=120)
def test_a_changed_file_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    path, parse = JSON_FILES[kind]
    told = json.loads(path.read_text())
    place = data.draw(st.sampled_from(paths(told)))
    how = data.draw(st.sampled_from(["put", "drop", "more"]))
    text = json.dumps(changed(told, place, how, data.draw(st.sampled_from(ODD))))
    check_refusal(parse, text)


@pytest.mark.parametrize("kind", JSON_FILES)
@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_text_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    path, parse = JSON_FILES[kind]
    text = path.read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    noise = data.draw(
        st.sampled_from(["", "}", "]", '"', ",", "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 20_000, "\0"])
    )
    check_refusal(parse, text[:at] + noise + text[at + data.draw(st.integers(0, 9)) :])


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_key_given_twice_is_refused(kind: str) -> None:
    path, parse = JSON_FILES[kind]
    with pytest.raises(LopsidedError, match="'version' is given twice"):
        parse(path.read_text().replace('"version"', '"version": 1, "version"', 1))


@given(
    st.integers(0, 40),
    st.sampled_from(["=", "1", "nan", "inf", '"x"', "true", "[]", "{}", "[[1]]", "9" * 5000, "[" * 9000, ""]),
)
@settings(max_examples=150)
def test_a_changed_cluster_is_read_or_refused(line: int, value: str) -> None:
    lines = (OLDER / "cluster.toml").read_text().splitlines()
    key = lines[line % len(lines)].split("=")[0]
    lines[line % len(lines)] = f"{key}= {value}" if value else ""
    check_refusal(parse_cluster, "\n".join(lines))


# Files of the version before

OLD_CLUSTER = Cluster(
    "measured",
    'two nodes,\nmeasured "once" →',
    (
        Kind(
            *("a100", "big", 1, 2, (("f32", 19.5e12), ("bf16", 156e12)), 1.555e12, 40 * 2**30, 8e-6, "the datasheet"),
            (Measured("aten.relu.default(f32[70, 10])", ((1.0, 3.1e-3), (0.5, 1.6e-3)), ((1.0, 6e-3),)),),
            *(0.25, 2e-5, 1.5),
        ),
        Kind("t4", "small", 1, 1, (("f32", 8.1e12),), 3.2e11, 16 * 2**30 - 1, 1e-5),
    ),
    Link(1e-5, 2e11),
    Link(3e-5, 12.5e9),
    (("all_gather", "padded", Link(2e-4, 8.2e8, 0.5)), ("all_reduce", "ring", Link(3e-4, 4.8e8))),
    (("big", "small", Link(1e-3, 2.5e7)),),
    1.5,
    3.0,
)


def test_an_older_cluster_means_the_same() -> None:
    found = load_cluster(OLDER / "cluster.toml")
    assert found == OLD_CLUSTER
    assert found.fingerprint == "e92d4cacbe52a846"


@pytest.mark.parametrize("name", ["plan.json", "plan_measured.json"])
def test_an_older_plan_means_the_same(name: str) -> None:
    told = json.loads((OLDER / name).read_text())
    plan = load_plan(OLDER / name)
    assert not any(note.startswith(EDITED) for note in plan.notes)
    assert (plan.step_s, list(plan.memory_bytes), list(plan.devices)) == (
        told["step_s"],
        told["memory_bytes"],
        told["devices"],
    )
    assert str(plan.program).splitlines() == told["program"]
    assert plan.graph.text(sources=True).splitlines() == told["graph"]
    assert parse_plan(plan_text(plan)) == plan
    if name == "plan.json":
        made = plan_of(ZERO, regather=True)
        assert str(plan.program) == str(made.program)
        assert (plan.shares, plan.cluster, plan.search) == (made.shares, made.cluster, made.search)
        assert plan_text(plan) == (OLDER / name).read_text()
    else:
        assert plan.cluster == OLD_CLUSTER


def test_an_older_run_means_the_same() -> None:
    run = load_run(OLDER / "run.json")
    assert (run.model, run.torch, run.timed_s) == ("by hand", "2.13", (1.0, 1.2, 1.1))
    assert [len(device.recorded) for device in run.devices] == [1, 1, 1]
    last = run.devices[1].recorded[0].spans[-1]
    assert last == Span("network", "a sum", 9.5, 12.0, "all_reduce", "ring", 4096, 1.0, 2.5)
    assert run_text(run) == (OLDER / "run.json").read_text()


def test_an_older_checkpoint_is_written_the_same(tmp_path: Path) -> None:
    write_file(tmp_path / "training.json", read_training(STEP))
    assert (tmp_path / "training.json").read_text() == (STEP / "training.json").read_text()


def went_on(folder: str) -> tuple[int, dict[str, torch.Tensor], float]:
    pm = ByHand(THREE, seed=9)
    optimizer = make_optimizer(pm)
    return load(pm, optimizer, folder), full_state_dict(pm), optimizer.param_groups[0]["lr"]


def test_an_older_checkpoint_goes_on_elsewhere(worker_pools: Callable[[int], WorkerPool]) -> None:
    wanted = trained_whole(2)
    for step, state, rate in worker_pools(3).run(went_on, str(OLDER / "checkpoint")):
        assert (step, rate) == (2, 0.05)
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def test_a_newer_checkpoint_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STEP, tmp_path / "step")
    told = json.loads((STEP / "training.json").read_text())
    (tmp_path / "step" / "training.json").write_text(json.dumps(told | {"version": 2}))
    with pytest.raises(CheckpointError, match="made by a newer lopsided"):
        read_training(tmp_path / "step")
