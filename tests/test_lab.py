"""The lab: what it does to a machine, that it is what was asked for, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
with contextlib.suppress(ValueError):
    sys.path.remove(str(BENCHMARKS))
sys.path.append(str(BENCHMARKS))

import lab  # noqa: E402
import lab_cgroup  # noqa: E402
import lab_spec  # noqa: E402
from lab import SPECS, Host, LabSpec, build  # noqa: E402

TWO = LabSpec("two", "a pair, one of them slow and far", (Host("a", 1.0), Host("b", 0.25, 200.0, 2.0)))


def _why_no_hosts() -> str:
    """Why a lab cannot be built here; found by building one, since a container may refuse any part of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", lab.LabWarning)
            with build(TWO) as made:
                done = made.execute([["true"], ["true"]], timeout_s=60)
    except (lab.LabError, lab.LabWarning, OSError, subprocess.SubprocessError) as error:
        return str(error) or type(error).__name__
    return next((one.stderr.strip() or "a command fails in a host" for one in done if one.returncode), "")


OBSTACLE = _why_no_hosts()
needs_hosts = pytest.mark.skipif(bool(OBSTACLE), reason=f"no hosts on this machine: {OBSTACLE}")


def left_of(name: str) -> list[str]:
    """Whatever carries the name of a lab."""
    root, _ = lab_cgroup.root()
    said = [
        subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for words in (["ip", "netns", "list"], ["ip", "link"])
    ]
    folders = [*Path(tempfile.gettempdir()).glob(f"{name}*"), *(root.glob(f"{name}*") if root else ())]
    return [
        *(line for text in said for line in text.splitlines() if "lps" in line and name in line),
        *map(str, folders),
    ]


def links() -> list[str]:
    words = ["ip", "-json", "link"]
    return sorted(link["ifname"] for link in json.loads(subprocess.run(words, capture_output=True, check=True).stdout))


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


# Without doing anything to the machine


def test_the_specs_are_what_the_proof_asks_for() -> None:
    assert {name: [host.cpu for host in spec.hosts] for name, spec in SPECS.items() if spec.kind == "cpu"} == {
        "lab-cpu": [1.0, 0.5, 0.25, 0.25],
        "lab-cpu-2link": [1.0, 0.5, 0.25, 0.25],
        "lab-even": [0.5, 0.5, 0.5, 0.5],
    }
    assert [host.gpu_percent for host in SPECS["lab-gpu"].hosts] == [50, 25, 12, 12]
    assert [host.gpu_percent for host in SPECS["lab-gpu-2"].hosts] == [70, 30]
    assert [host.gpu_percent for host in SPECS["lab-nccl"].hosts] == [50, 25, 12, 12]
    assert [host.gpu_percent for host in SPECS["lab-nccl-2"].hosts] == [50, 25]
    assert {name for name, spec in SPECS.items() if spec.nccl} == {"lab-nccl", "lab-nccl-2"}


def test_hosts_are_spread_over_the_cores() -> None:
    hosts = SPECS["lab-cpu"].hosts
    assert lab_spec.cores_for(hosts, [0, 1]) == ((0,), (1,), (1,), (1,))
    assert sorted(lab_spec.cores_for(SPECS["lab-even"].hosts, [0, 1])) == [(0,), (0,), (1,), (1,)]
    assert len(set(lab_spec.cores_for(hosts, range(8)))) == 4
    assert lab_spec.cores_for([Host("small", 0.5), Host("large", 2.0)], [3, 4, 5]) == ((5,), (3, 4))


@pytest.mark.parametrize("netem", [True, False])
def test_every_cable_is_shaped_at_both_ends(netem: bool) -> None:
    spec = SPECS["lab-cpu-2link"]
    commands = lab_spec.network(spec, "lps-1-2-3", netem=netem)
    shaped = [(words[2], words[6], words[words.index("rate") + 1]) for words in commands if "tbf" in words]
    for rank, host in enumerate(spec.hosts):
        assert ("lps-1-2-3-switch", f"h{rank}", "1000000kbit") in shaped
        assert (f"lps-1-2-3-{host.name}", "eth0", "1000000kbit") in shaped
    assert {("lps-1-2-3-switch", end, "200000kbit") for end in ("t1", "t1far")} <= set(shaped)
    assert len(shaped) == 10
    delayed = [words[6] for words in commands if "netem" in words]
    assert delayed == (["t1", "t1far"] if netem else [])
    assert lab_spec.delayed(spec) == {"t1": 1.0}


def test_all_links_are_made_in_namespaces() -> None:
    for spec in SPECS.values():
        for words in lab_spec.network(spec, "lps-1-2-3", netem=True):
            assert words[1] == "-n"
            assert words[2].startswith("lps-1-2-3-")


def test_torchrun_is_what_one_types_on_every_machine() -> None:
    seats = lab_spec.host_seats(SPECS["lab-cpu"], "lps-1-2-3", Path("/tmp/lps-1-2-3"), [0, 1])
    words = lab_spec.torchrun(seats, 2, 29501, ["train.py", "--steps", "3"])
    assert words[1:9] == ["-m", "torch.distributed.run", "--nnodes", "4", "--node-rank", "2", "--nproc-per-node", "1"]
    assert words[9:15] == ["--master-addr", "10.77.0.1", "--master-port", "29501", "--local-addr", "10.77.0.3"]
    assert words[15:] == ["train.py", "--steps", "3"]
    assert lab_spec.environment(seats[2])["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_name_tells_whose_it_is() -> None:
    assert lab.is_in_use(lab.own_name(1))
    ended = subprocess.run(python("import os; print(os.getpid())"), capture_output=True, text=True, check=True)
    assert not lab.is_in_use(f"lps-{int(ended.stdout):x}-1-1")
    assert not lab.is_in_use(f"lps-{os.getpid():x}-1-1")  # the same number, but another process
    assert lab.is_in_use("lps-mine")


def test_cleaning_leaves_what_is_not_of_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lab, "NETNS", tmp_path / "netns")
    monkeypatch.setattr(lab_cgroup, "root", lambda: (None, "not here"))
    dead, elsewhere = f"lps-{os.getpid():x}-1-9", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (dead, lab.own_name(999), "lps-mine", f"my-{dead}", f"{dead}-photos"):
        (tmp_path / name).mkdir()
    (tmp_path / f"lps-{os.getpid():x}-2-9").symlink_to(elsewhere)
    assert dead in lab.clean()
    assert not (tmp_path / dead).exists()
    assert elsewhere.exists()
    assert {path.name for path in tmp_path.glob("*mine")} | {path.name for path in tmp_path.glob("my-*")} == {
        "lps-mine",
        f"my-{dead}",
    }
    assert (tmp_path / lab.own_name(999)).exists()
    assert (tmp_path / f"{dead}-photos").exists()


def test_without_root_hosts_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_obstacle", lambda name: "that needs root")
    tell = python("import os; print(*os.sched_getaffinity(0), os.environ['GLOO_SOCKET_IFNAME'])")
    with contextlib.ExitStack() as stack:
        with pytest.warns(lab.LabWarning, match="needs root"):
            made = stack.enter_context(build(SPECS["lab-cpu"]))
        done = made.execute([tell] * 4)
    expected = lab_spec.cores_for(made.spec.hosts, sorted(os.sched_getaffinity(0)))
    assert [one.stdout.split() for one in done] == [[*map(str, cores), "lo"] for cores in expected]
    assert not made.folder.exists()


def test_a_gpu_lab_runs_in_a_service_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for NVIDIA's program that writes down what it is told."""
    log, stand_in = tmp_path / "log", tmp_path / "nvidia-cuda-mps-control"
    told = f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) or sys.stdin.read().strip())"
    where = f"open({str(log)!r}, 'a').write(' ' + os.environ['CUDA_MPS_PIPE_DIRECTORY'] + chr(10))"
    stand_in.write_text(f"#!{sys.executable}\nimport os, sys\n{told}\n{where}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    names = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY", "LOPSIDED_DEVICE", "GLOO_SOCKET_IFNAME")
    with build(SPECS["lab-gpu"]) as made:
        pipes = str(made.folder / "mps")
        done = made.execute([python("import os, sys; print(*(os.environ[n] for n in sys.argv[1:]))", *names)] * 4)
    assert [one.stdout.split() for one in done] == [[part, pipes, "cuda:0", "lo"] for part in ("50", "25", "12", "12")]
    assert log.read_text().splitlines() == [f"-d {pipes}", f"quit -t 5 {pipes}"]
    assert not made.folder.exists()


def test_hosts_that_talk_over_nccl_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats = lab_spec.gpu_seats(SPECS["lab-nccl"], tmp_path, "/somewhere/libnccl.so.2")
    assert [seat.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for seat in seats] == ["50", "25", "12", "12"]
    for seat in seats:
        assert seat.env["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert (seat.env["LD_PRELOAD"], seat.env[lab_spec.BACKEND]) == ("/somewhere/libnccl.so.2", "nccl")
    assert "LD_PRELOAD" not in lab_spec.gpu_seats(SPECS["lab-nccl-2"], tmp_path)[0].env
    (over_gloo, *_) = lab_spec.gpu_seats(SPECS["lab-gpu"], tmp_path, "/somewhere/libnccl.so.2")
    assert over_gloo.env[lab_spec.BACKEND] == "gloo"
    assert not {"LD_PRELOAD", "NCCL_MULTI_RANK_GPU_ENABLE"} & {*over_gloo.env}
    monkeypatch.setenv(lab_spec.NCCL_LIBRARY, str(tmp_path / "none.so"))
    with pytest.raises(lab.LabError, match=r"there is no .*none\.so"), build(SPECS["lab-nccl"]):
        pass


def test_a_gpu_lab_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: None)
    with pytest.raises(lab.LabError, match="NVIDIA GPU"), build(SPECS["lab-gpu"]):
        pass
    assert not list(Path(tempfile.gettempdir()).glob(f"{lab.own_name(0)[:-1]}*"))


def test_a_check_is_told_as_a_table() -> None:
    speed = {"per_s": 25.0, "block_s": 0.03, "variation": 0.1}
    hosts = [{"alone": {**speed, "per_s": 100.0}, "short": speed, "long": speed}] * 4
    link = {"from": 0, "to": 2, "round_trip_s": 0.0024, "small_mbit": 150.0, "bulk_mbit": 197.0}
    found = {"hosts": hosts, "bytes": 4_000_000, "links": [link], "all_reduces_s": [0.06]}
    text = lab.check_table(SPECS["lab-cpu-2link"], found)
    assert "b        50%    25.0% (-50.0%)" in text
    assert "a → c   200 Mbit/s 2 ms    197 Mbit/s" in text
    assert "wrong" not in text


def test_a_part_of_a_gpu_that_multiplies_wrongly_is_told() -> None:
    speed = {"per_s": 25.0, "block_s": 0.03, "variation": 0.1}
    parts = [{"short": speed, "long": speed, "off": off} for off in (0.52, 0.001)]
    text = lab.check_table(SPECS["lab-gpu-2"], {"hosts": parts, "bytes": 0})
    assert "products of bf16 are wrong on a by 52%" in text
    assert "b by" not in text


# On this machine


@needs_hosts
def test_a_host_has_its_name_link_and_share() -> None:
    before = links()
    tell = (
        "import json, os, socket, sys\n"
        "group = os.environ['GROUP'] + '/' + sys.argv[1]\n"
        "names = ('cpu.max', 'cpu.cfs_quota_us', 'cpu.cfs_period_us')\n"
        "quota = [open(group + '/' + n).read().split() for n in names if os.path.exists(group + '/' + n)]\n"
        "print(json.dumps([socket.gethostname(), [name for _, name in socket.if_nameindex()],"
        " socket.gethostbyname('lab-cpu-c'), str(os.getpid()) in open(group + '/cgroup.procs').read().split(),"
        " sum(quota, []), sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0) == os.SCHED_BATCH]))"
    )
    with build(SPECS["lab-cpu"]) as made:
        group = str(Path(made.seats[0].cgroup).parent)
        done = made.execute([python(tell, host.name) for host in made.spec.hosts], env={"GROUP": group})
        assert links() == before  # nothing of it is in the machine's own network
        assert left_of(made.name)
    assert [one.returncode for one in done] == [0] * 4, done
    for one, seat in zip(done, made.seats, strict=True):
        name, devices, address, inside, quota, cores, patient = json.loads(one.stdout)
        assert name == f"lab-cpu-{one.host}"
        assert {"lo", "eth0"} <= set(devices)
        assert address == "10.77.0.3"
        assert inside
        assert quota == [str(round(seat.host.cpu * 20_000)), "20000"]
        assert tuple(cores) == seat.cores
        assert patient
    assert left_of(made.name) == []


@needs_hosts
def test_nothing_stays_after_an_exception() -> None:
    names: list[str] = []

    def fail() -> None:
        with build(TWO) as made:
            names.append(made.name)
            assert left_of(made.name)
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    assert left_of(names[0]) == []


@needs_hosts
def test_nothing_stays_if_building_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def refuse(spec: LabSpec, name: str, *, netem: bool) -> list[list[str]]:
        names.append(name)
        return [["ip", "link", "show", "there-is-none"]]

    monkeypatch.setattr(lab, "network", refuse)
    with pytest.raises(lab.LabError, match="there-is-none"), build(TWO):
        pass
    assert left_of(names[0]) == []


SLEEPER = """
import sys, lab
with lab.build(lab.SPECS["lab-cpu-2link"]) as made:
    # A process that outlives the command that started it, and hears no SIGTERM.
    stay = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    start = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(99)"
    say = lambda host, line: print(made.name, flush=True)
    made.execute([[sys.executable, "-c", start, stay]] * 4, on_line=say)
"""


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a lab that is in use, and the name of the lab."""
    with subprocess.Popen(
        python(SLEEPER), cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            names = {process.stdout.readline().strip() for _ in range(4)}
            assert len(names) == 1
            yield process, names.pop()
        finally:
            process.terminate()


def inside(name: str) -> list[str]:
    root, _ = lab_cgroup.root()
    assert root is not None
    return [pid for procs in (root / name).glob("*/cgroup.procs") for pid in procs.read_text().split()]


def is_alive(pid: str) -> bool:
    """A dead process that nobody has asked about yet (state Z) is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_after_a_signal(number: signal.Signals, sleeper: tuple[subprocess.Popen[str], str]) -> None:
    process, name = sleeper
    pids = inside(name)
    assert len(pids) == 8
    process.send_signal(number)
    process.wait(30)
    assert left_of(name) == []
    assert not [pid for pid in pids if is_alive(pid)]


@needs_hosts
def test_cleaning_removes_what_a_killed_run_left(sleeper: tuple[subprocess.Popen[str], str]) -> None:
    process, name = sleeper
    clean = [sys.executable, str(BENCHMARKS / "lab.py"), "--clean"]
    while_alive = subprocess.run(clean, capture_output=True, text=True, check=True).stdout
    assert name not in while_alive
    pids = inside(name)
    process.kill()
    process.wait(30)
    assert left_of(name)
    assert f"removed {name}" in subprocess.run(clean, capture_output=True, text=True, check=True).stdout
    assert left_of(name) == []
    assert not [pid for pid in pids if is_alive(pid)]


@needs_hosts
def test_when_one_host_fails_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "GRACE_S", 0.2)
    with build(TWO) as made:
        failed = made.execute([python("import time; time.sleep(60)"), python("raise SystemExit(3)")], timeout_s=50)
        late = made.execute([python("import time; time.sleep(60)"), python("print('soon')")], timeout_s=8)
    assert [(one.returncode, one.timed_out) for one in failed] == [(-signal.SIGTERM, False), (3, False)]
    assert [(one.returncode, one.timed_out) for one in late] == [(-signal.SIGTERM, True), (0, False)]
    assert late[1].stdout == "soon\n"


REDUCE = """
import socket, time, torch, torch.distributed as dist, lab
dist.init_process_group("gloo")
rank = dist.get_rank()
lab.start_line(rank)
numbers = torch.full((1000,), 10.0**rank)
dist.all_reduce(numbers)
one, trips = torch.zeros(1), []
for _ in range(5):
    began = time.perf_counter()
    if rank == 0:
        dist.send(one, 1)
        dist.recv(one, 1)
    elif rank == 1:
        dist.recv(one, 0)
        dist.send(one, 0)
    trips.append(time.perf_counter() - began)
print(socket.gethostname(), int(numbers[7]), min(trips))
dist.barrier()
dist.destroy_process_group()
"""


@needs_hosts
def test_torchrun_joins_the_hosts_and_a_cable_takes_its_time(tmp_path: Path) -> None:
    (tmp_path / "reduce.py").write_text(REDUCE)
    with build(TWO) as made:
        done = made.run(
            [str(tmp_path / "reduce.py")], env={"PYTHONPATH": str(BENCHMARKS)}, timeout_s=60, fast_start=True
        )
    assert [one.returncode for one in done] == [0, 0], done
    said = [one.stdout.split() for one in done]
    assert [words[:2] for words in said] == [["two-a", "11"], ["two-b", "11"]]
    assert float(said[0][2]) >= 0.004  # two milliseconds there and two back: less would need another way


@pytest.mark.slow
@needs_hosts
def test_four_ranks_reduce_over_gloo(tmp_path: Path) -> None:
    (tmp_path / "reduce.py").write_text(REDUCE)
    with build(SPECS["lab-cpu-2link"]) as made:
        done = made.run([str(tmp_path / "reduce.py")], env={"PYTHONPATH": str(BENCHMARKS)}, timeout_s=100)
    assert [one.stdout.split()[:2] for one in done] == [[f"lab-cpu-2link-{name}", "1111"] for name in "abcd"], done
