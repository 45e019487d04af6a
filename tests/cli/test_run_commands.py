"""The commands about runs: the line for torchrun, proofs on processes, checkpoints as one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lopsided.capturing.retype import in_dtype
from lopsided.cli import run_commands as cli_run
from lopsided.cli.app import app
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import InputError, LopsidedError, PlanError
from lopsided.ir.placement import Shares
from lopsided.ir.program import parse_program
from lopsided.planner.plan_data import Plan
from lopsided.planner.plan_file import save_plan
from lopsided.runtime.checkpoint.checkpoint import save
from lopsided.runtime.launch import launch_words
from lopsided.verification.on_processes import Claim
from tests.support import clusters
from tests.support.jobs import Run, classic, cluster_of, model_of, parallel_of, parsed
from tests.support.traced_only import traced_only

SPEC = "mlp:layers=2,width=12,classes=5,batch=7"


def lopsided(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


def refused(*arguments: object) -> LopsidedError:
    error = lopsided(*arguments).exception
    assert isinstance(error, LopsidedError)
    return error


@pytest.fixture(scope="module")
def one() -> Plan:
    return parsed(classic(SPEC, "zero-again", Shares((0.6, 0.4))))


@pytest.fixture(scope="module")
def two(one: Plan) -> Plan:
    """The same for nodes with different numbers of devices."""
    plan = parsed(classic(SPEC, "dp", Shares((0.2, 0.3, 0.5))))
    kind = cluster_of(1).kinds[0]
    kinds = tuple(replace(kind, node=node, count=count) for node, count in (("big", 2), ("small", 1)))
    where = clusters.cluster(*kinds)
    return replace(plan, cluster=where, on=where)


@pytest.fixture
def here(one: Plan, two: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_plan(one, tmp_path / "one.json")
    save_plan(two, tmp_path / "two.json")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# run


def words(plan: Plan, *options: str, **named: str) -> str:
    return " ".join(launch_words(plan, "train.py", ["--lr", "1"], options=options, **named))


def test_a_process_for_each_device_of_the_plan(here: Path, one: Plan, two: Plan) -> None:
    assert words(one) == "--nproc-per-node 2 --standalone train.py --lr 1"
    assert words(two, node="small", master="a:1234") == (
        "--nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr a --master-port 1234 train.py --lr 1"
    )
    assert words(two, node="big", master="[::1]").startswith(
        "--nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr ::1 --master-port 29500"
    )


def test_options_for_torchrun_win_and_stand_in_for_ours(here: Path, one: Plan, two: Plan) -> None:
    assert words(two, "--nproc_per_node=3") == "--nproc-per-node 3 --standalone --nproc_per_node=3 train.py --lr 1"
    assert "--standalone" not in words(one, "--rdzv-backend", "c10d")
    met = words(two, "--rdzv-endpoint=a:1", node="small")
    assert met == "--nnodes 2 --node-rank 1 --nproc-per-node 1 --rdzv-endpoint=a:1 train.py --lr 1"
    assert launch_words(one, "package.train", [], options=["-m"])[-2:] == ["-m", "package.train"]


def test_everything_behind_the_script_is_the_scripts(here: Path) -> None:
    done = lopsided("run", "--max-restarts", 2, "one.json", "--dry-run", "train.py", "--node", "x", "--dry-run", "-v")
    assert done.exit_code == 0
    assert done.stdout == (
        f"LOPSIDED_PLAN={here.resolve()}/one.json torchrun --nproc-per-node 2 --standalone --max-restarts 2 train.py "
        "--node x --dry-run -v\n"
    )


def test_the_command_is_the_agent_of_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr("lopsided.runtime.torchrun.main", lambda words: became.append(words) or 0)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("LOPSIDED_PLAN", "another")
    assert lopsided("run", "one.json", "train.py", "a b").exit_code == 0
    assert became[0][-5:] == ["--nproc-per-node", "2", "--standalone", "train.py", "a b"]
    assert os.environ["LOPSIDED_PLAN"] == str(here.resolve() / "one.json")


BAD: dict[str, tuple[list[str], str]] = {
    "no plan": (["none.json", "train.py"], "no such file"),
    "no script": (["one.json", "trian.py"], "no script 'trian.py'"),
    "a folder": (["one.json", "."], "is a directory"),
    "which node": (["two.json", "train.py"], "--node NAME --master HOST:PORT"),
    "where": (["two.json", "--node", "big", "train.py"], "--master HOST:PORT"),
    "no such node": (["two.json", "--node", "smal", "--master", "a", "train.py"], "did you mean small?"),
    "no address": (["two.json", "--node", "big", "--master", "a:b", "train.py"], "'a:b' is not an address"),
    "no option": (["one.json", "--nod", "a", "train.py"], "there is no option --nod"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_started_is_refused(here: Path, case: str) -> None:
    arguments, word = BAD[case]
    error = refused("run", *arguments)
    assert isinstance(error, InputError)
    assert word in str(error)


# verify


def test_a_plan_on_processes(here: Path) -> None:
    done = lopsided("verify", SPEC, "--plan", "one.json", "--processes", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (told["passed"], told["devices"], told["processes"]) == (True, 2, True)
    names = ["the captured graph", "the plan: a step in float64", "the plan: 20 AdamW steps in float32"]
    assert [claim["what"] for claim in told["claims"]] == names
    assert [claim["tolerance"] for claim in told["claims"][1:]] == [1e-9, 1e-4]
    assert all(0 <= claim["error"] <= claim["tolerance"] for claim in told["claims"])
    assert "rank" in told["claims"][1]["where"]


def test_a_plan_on_simulated_devices(here: Path) -> None:
    done = lopsided("verify", SPEC, "--plan", "two.json")
    assert done.exit_code == 0
    assert "3 simulated devices" in done.stdout
    assert "same as one device" in done.stdout


def test_programs_and_plans_as_functions(here: Path) -> None:
    with traced_only() as made:
        done = lopsided("verify", SPEC, "--compiled", "--programs", 4, "--json")
        told = json.loads(done.stdout)
        assert (done.exit_code, told["passed"]) == (0, True)
        assert (told["functions_compiled"], told["functions_refused"]) == (len(made), 0)
        assert made
        made.clear()
        by_plan = lopsided("verify", SPEC, "--plan", "two.json", "--compiled")
        assert by_plan.exit_code == 0
        assert f"{len(made)} functions compiled\n" in by_plan.stdout
        assert made


@pytest.mark.slow
def test_a_plan_compiled_on_processes(here: Path) -> None:
    done = lopsided("verify", SPEC, "--plan", "one.json", "--processes", "--compiled", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["passed"], told["functions_refused"]) == (0, True, 0)
    assert told["functions_compiled"]


def test_a_plan_in_half_precision_is_compared_loosely(here: Path, one: Plan) -> None:
    graph = in_dtype(one.graph, "bf16")
    save_plan(replace(one, program=parse_program(str(one.program), graph)), "half.json")
    done = lopsided("verify", SPEC, "--plan", "half.json", "--processes")
    assert done.exit_code == 0
    assert "20 AdamW steps in bfloat16" in done.stdout
    assert "compared loosely" in done.stdout


def test_random_programs_and_classics_on_processes() -> None:
    done = lopsided("verify", SPEC, "--processes", "--devices", 2, "--programs", 3, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    names = [claim["what"].partition(":")[0] for claim in told["claims"]]
    assert names == [
        "the captured graph",
        *["data parallel"] * 2,
        *["ZeRO"] * 2,
        *["ZeRO, gathered again"] * 2,
        "3 random programs",
    ]
    assert told["passed"]


def test_processes_take_their_numbers_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawn from the system: no seed makes them the same.
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "def drawn(*shape):\n"
        "    seed = int.from_bytes(os.urandom(4), 'big')\n"
        "    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(drawn(3, 2))\n"
        "    def forward(self, x):\n"
        "        return (x @ self.weight).square().mean()\n"
        "def make(batch=6):\n"
        "    return Mine(), {'x': drawn(batch, 3)}\n"
    )
    monkeypatch.chdir(tmp_path)
    done = lopsided("verify", "mine.py:make", "--processes", "--shares", ".7,.3", "--programs", 1, "--json")
    assert done.exit_code == 0, done.stdout
    assert json.loads(done.stdout)["devices"] == 2


@pytest.mark.slow
def test_a_transformers_model_on_processes() -> None:
    sizes = "n_layer=1,n_embd=16,n_head=2,vocab_size=31,n_positions=16"
    done = lopsided("verify", f"hf:GPT2LMHeadModel:{sizes}", "--batch", 4, "--processes", "--devices", 2)
    assert done.exit_code == 0, done.output


def test_what_differs_ends_with_status_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = [Claim("the plan: a step in float64", 1e-3, "loss, rank 1", 1e-9)]
    monkeypatch.setattr(cli_run, "prove", lambda pool, jobs, progress: off)
    monkeypatch.setattr(cli_run, "WorkerPool", lambda size, timeout_s: nullcontext())
    done = lopsided("verify", SPEC, "--plan", "one.json", "--processes")
    assert done.exit_code == 1
    assert "1.0e-03" in done.stdout
    assert "NOT the same" in done.stdout


def test_a_plan_of_another_model_is_refused_with_what_differs(here: Path) -> None:
    error = refused("verify", SPEC, "--batch", 6, "--plan", "one.json", "--processes")
    assert isinstance(error, PlanError)
    assert "f32[7, 12] and is f32[6, 12]" in str(error)
    assert "--batch" in error.do
    assert "a plan has shares" in str(refused("verify", SPEC, "--plan", "one.json", "--shares", ".5,.5"))


# convert


def saved(run: Run, folder: str) -> None:
    pm = parallel_of(run)
    save(pm, None, folder)
    pm.close()


def test_a_checkpoint_becomes_one_file(worker_pools: Callable[[int], WorkerPool], tmp_path: Path) -> None:
    worker_pools(2).run(saved, classic(SPEC, "zero", Shares((0.6, 0.4))), str(tmp_path / "run"))
    done = lopsided("convert", tmp_path / "run", "-o", tmp_path / "model.safetensors")
    assert done.exit_code == 0, done.output
    assert f"written to {tmp_path}/model.safetensors, " in done.stdout
    found, wanted = load_file(tmp_path / "model.safetensors"), model_of(SPEC)[0].state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert ".safetensors" in str(refused("convert", tmp_path / "run", "-o", tmp_path / "model"))


# What is written over

OLDER = Path(__file__).parents[1] / "older_files"
WRITES = {
    "plan": ("plan", SPEC, "--cluster", "2xA6000+2x2080Ti", "-o"),
    "profile": ("profile", "--from-run", OLDER / "run.json", "-o"),
    "report": ("report", OLDER / "plan.json", "-o"),
    "trace": ("trace", OLDER / "plan.json", "-o"),
    "train": ("train", SPEC, "--processes", "1", "--report"),
    "run": ("run", "--dry-run", "--report"),
    "convert": ("convert", OLDER / "checkpoint", "-o"),
    "convert to torch's": ("convert", OLDER / "checkpoint", "-o"),
}
ENDS = {"convert": ".safetensors", "convert to torch's": ".pt", "profile": ".toml", "report": ".html"}


@pytest.mark.parametrize("command", WRITES)
def test_a_file_of_another_kind_is_not_written_over(command: str, tmp_path: Path) -> None:
    file = tmp_path / f"thesis{ENDS.get(command, '.json')}"
    # Options of this command stand before the plan.
    behind = (OLDER / "plan.json", __file__) if command == "run" else ()
    file.write_text('{"title": "a year of work"}\n')
    error = refused(*WRITES[command], file, *behind)
    assert "a file of another kind is there" in error.what
    assert (error.where, error.do) == (str(file), "name another file, or add --force")
    assert file.read_text() == '{"title": "a year of work"}\n'


@pytest.mark.parametrize("command", ["plan", "profile", "report", "trace", "convert", "convert to torch's"])
def test_a_file_of_the_same_kind_is(command: str, tmp_path: Path) -> None:
    file = tmp_path / f"made{ENDS.get(command, '.json')}"
    file.write_text("notes")
    forced = lopsided(*WRITES[command], file, "--force")
    assert forced.exit_code == 0, forced.output
    before = file.read_bytes()
    assert before != b"notes"
    again = lopsided(*WRITES[command], file)
    assert again.exit_code == 0, again.output
    file.write_bytes(b"")
    assert lopsided(*WRITES[command], file).exit_code == 0
