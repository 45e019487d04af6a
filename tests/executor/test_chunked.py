"""Losses that run some rows at a time: the same as all at once, in every form, on any devices, and with outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lopsided
from lopsided.capturing.capture_graph import capture, capture_call
from lopsided.comm.worker_pool import WorkerPool
from lopsided.errors import ProgramError, TrainingError
from lopsided.executor.chunked import RunChunked
from lopsided.ir.graph import Graph
from lopsided.ir.placement import Shares
from lopsided.models import zoo
from lopsided.ops.derive import derive_rules
from lopsided.planner.baselines import data_parallel, stored_cut
from lopsided.runtime.parallel import Parallel
from lopsided.schedule.cost import Scale, optimizer_named
from lopsided.schedule.decisions import Decisions, Rerun, parse_rerun
from lopsided.schedule.loss_heads import chunks_of, loss_heads
from lopsided.schedule.lower import lower
from lopsided.schedule.memory import bytes_per_kind, holdings
from lopsided.schedule.schedule import Compute, check_schedule, parse_schedule
from lopsided.verification.on_processes import meet
from lopsided.verification.simulator import simulate
from lopsided.verification.verifier import compare, random_program
from tests.support import jobs
from tests.support.jobs import cluster_of, plan_of, prices_of, run_of

SHARES = (0.5, 0.3, 0.2)
CLASSES, WIDTH, BATCH, LENGTH = 23, 12, 5, 7


class Head(nn.Module):
    """Words, a layer, and a loss in one of the forms that models write."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.words, self.up = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias="bias" in form)
        self.matrix = nn.Parameter(torch.randn(WIDTH, CLASSES)) if form == "matrix" else None
        if form == "tied":
            self.head.weight = self.words.weight
        if "frozen" in form:
            self.head.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.words(tokens)))
        logits = self.head(x) if self.matrix is None else x @ self.matrix
        return self.loss(logits, labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        how: dict[str, Any] = {}
        if self.form == "shifted":  # as transformers did until it padded labels
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits, labels = wide[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        elif self.form == "padded":
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        elif self.form == "capped":
            logits = torch.tanh(logits / 30.0) * 30.0
        elif self.form == "smooth":
            how = {"label_smoothing": 0.2, "ignore_index": 3}
        elif "sum" in self.form:
            how = {"reduction": "sum"}
        elif self.form == "ignored":
            how = {"ignore_index": 2}
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1), **how)
        return 0.5 * loss + self.up.weight.square().mean() if self.form == "with another" else loss


FORMS = (
    *("plain", "bias", "tied", "matrix", "shifted", "padded", "capped", "smooth", "sum", "bias sum", "ignored"),
    *("with another", "frozen", "frozen bias"),
)


def batch_of(rows: int = BATCH) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)
    return {name: torch.randint(0, CLASSES, (rows, LENGTH), generator=made) for name in ("tokens", "labels")}


def in_chunks(graph: Graph, rows: int = 4) -> tuple[Rerun, ...]:
    return tuple(head.chunked(rows) for head in loss_heads(graph))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_exact(form: str) -> None:
    model, batch = Head(form).double(), batch_of()
    graph = capture(model, batch)
    assert len(loss_heads(graph)) == 1
    one = lopsided.one_device(graph)
    expected = simulate(one, model, batch, (1.0,))
    book = derive_rules(graph)
    programs = [(one, (1.0,)), (data_parallel(book, prices_of(graph, Shares(SHARES))), SHARES)]
    programs += [(programs[1][0], (0.6, 0.0, 0.4)), *((random_program(book, random.Random(k)), SHARES) for k in (3, 4))]
    chunked = 0
    for program, shares in programs:
        for rows in (1, 4, 100):
            decisions = Decisions(reruns=in_chunks(graph, rows))
            chunked += len(chunks_of(program, decisions))
            schedule = lower(program, decisions)
            check_schedule(schedule)
            assert parse_schedule(str(schedule), program) == schedule
            found = simulate(program, model, batch, shares, decisions=decisions)
            error, where = compare(found, expected)
            assert error < 1e-9, (rows, where)
    assert chunked >= 9


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "bert-moe"])
def test_language_models_have_a_loss_to_chunk(name: str) -> None:
    graph = jobs.book_of(zoo.SMALL[name]).graph
    (head,) = loss_heads(graph)
    assert graph.nodes[[node.name for node in graph.nodes].index(head.first)].op == "aten.linear.default"
    assert head.last == graph.loss


class Other(Head):
    """Where logits are needed for something else, or a row's loss is."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows, right = logits.view(-1, CLASSES), labels.reshape(-1)
        if self.form == "each":
            return F.cross_entropy(rows, right, reduction="none").square().mean()
        if self.form == "weights":
            return F.cross_entropy(rows, right, weight=self.words.weight[:, 0].exp().detach())
        if self.form == "soft":
            return F.cross_entropy(rows, F.one_hot(right, CLASSES).to(rows.dtype))
        if self.form == "turned":
            return F.cross_entropy(logits.transpose(1, 2), labels)
        return F.cross_entropy(rows, right) + 1e-3 * rows.logsumexp(-1).square().mean()


@pytest.mark.parametrize("form", ["each", "weights", "soft", "turned", "beside"])
def test_what_needs_more_than_the_sum_of_rows_is_left_alone(form: str) -> None:
    assert loss_heads(capture(Other(form), batch_of())) == ()


def test_all_logits_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = RunChunked.logits

    def seen(self: RunChunked, part: Tensor, matrix: Tensor, bias: Any) -> Tensor:
        rows.append(part.shape[0])
        return logits(self, part, matrix, bias)

    monkeypatch.setattr(RunChunked, "logits", seen)
    model, batch = Head("plain"), batch_of()
    graph = capture(model, batch)
    simulate(lopsided.one_device(graph), model, batch, (1.0,), decisions=Decisions(reruns=in_chunks(graph, 8)))
    assert rows == [8, 8, 8, 8, 3]


@pytest.mark.parametrize("form", ["bias", "shifted", "capped", "smooth"])
@pytest.mark.parametrize("dtype", ["autocast", "bf16"])
def test_in_narrow_dtypes_it_is_as_exact_as_all_at_once(form: str, dtype: str) -> None:
    """Both against float32: chunks add up in float32, and round no more often."""

    class Cast(Head):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens, labels)

    batch = batch_of()
    exact, model = Head(form), Cast(form) if dtype == "autocast" else Head(form).bfloat16()
    for source, copy in zip(exact.parameters(), model.parameters(), strict=True):
        source.data = copy.data.float()
    wanted = simulate(lopsided.one_device(capture(exact, batch)), exact, batch, (1.0,))
    graph = capture(model, batch)
    program = data_parallel(derive_rules(graph), prices_of(graph, Shares(SHARES)))
    whole = simulate(program, model, batch, SHARES)
    found = simulate(program, model, batch, SHARES, decisions=Decisions(reruns=in_chunks(graph)))
    assert chunks_of(program, Decisions(reruns=in_chunks(graph)))
    for name, gradient in wanted.gradients.items():
        scale = gradient.abs().max()
        off, off_whole = (((one.gradients[name] - gradient).abs().max() / scale).item() for one in (found, whole))
        assert found.gradients[name].dtype == whole.gradients[name].dtype
        assert off < max(2 * off_whole, 0.03), name


# What is lowered, held and refused


def test_what_runs_is_in_the_schedule() -> None:
    """Forward and backward where the loss stands, and its parameters' gradients leave behind the backward pass."""
    graph = capture(Head("plain"), batch_of())
    program = data_parallel(derive_rules(graph), prices_of(graph, Shares(SHARES)))
    schedule = lower(program, Decisions(reruns=in_chunks(graph)))
    (chunked,) = {item.id: item for item in schedule.chunked.values()}.values()
    nodes = [item.id for item in schedule.forward if isinstance(item, Compute) and item.node in chunked.nodes]
    assert nodes == ["linear_1", "view", "cross_entropy_loss", "∂cross_entropy_loss", "∂view", "∂linear_1"]
    assert not [item for item in schedule.backward if isinstance(item, Compute) and item.node in chunked.nodes]
    assert "give ∂head_weight P→I by reduce.0" in str(schedule).partition("backward")[2]
    assert {item.id for item in lower(program).passes if isinstance(item, Compute)} == {
        item.id for item in schedule.passes if isinstance(item, Compute)
    }


def test_a_chunk_is_held_in_place_of_all_logits() -> None:
    """Of many classes: what the whole loss holds beyond a chunk's is at least the logits and what is kept of them."""
    with torch.device("meta"):
        graph = capture(Head("plain"), batch_of(4000))
    program, scale, sgd = lopsided.one_device(graph), Scale(cluster_of(1), (1.0,)), optimizer_named("sgd")
    logits = 4000 * LENGTH * CLASSES * 4
    held = []
    for reruns in ((), in_chunks(graph, 64)):
        held.append(bytes_per_kind(holdings(lower(program, Decisions(reruns=reruns)), sgd), scale)[0])
    assert held[0] - held[1] > 1.9 * logits


def test_where_classes_are_cut_the_loss_runs_as_ever() -> None:
    graph = jobs.book_of(zoo.SMALL["gpt2"]).graph
    book = derive_rules(graph)
    decisions = Decisions(reruns=in_chunks(graph))
    programs = (random_program(book, random.Random(seed)) for seed in range(30))
    cut = next(p for p in programs if p.steps[-1].rule.how == "vocabulary")
    assert lower(cut, decisions).chunked == {}
    assert chunks_of(lopsided.one_device(graph), decisions)


def test_what_is_no_loss_is_not_chunked() -> None:
    graph = capture(Head("plain"), batch_of())
    (rerun,) = in_chunks(graph)
    assert parse_rerun(str(rerun)) == rerun
    program = lopsided.one_device(graph)
    with pytest.raises(ProgramError, match="no loss that can run some rows at a time"):
        lower(program, Decisions(reruns=(replace(rerun, first="linear"),)))
    with pytest.raises(ProgramError, match="some rows at a time and again"):
        lower(program, Decisions(reruns=(replace(rerun, level="whole", rows=0), rerun)))
    with pytest.raises(ProgramError, match="some rows at a time and again"):
        lower(program, Decisions(reruns=(rerun, rerun)))
    for text in ("a..b:0-rows", "a..b:-4-rows", "a..b:4", "a..b:4-rows:1", "a..b:chunked"):
        with pytest.raises(ProgramError, match="names no region"):
            parse_rerun(text)


# On processes


def test_processes_agree_with_one_device(worker_pools: Callable[[int], WorkerPool]) -> None:
    spec = zoo.SMALL["gpt2"]
    graph, shares = jobs.book_of(spec).graph, Shares(SHARES)
    plain = data_parallel(jobs.book_of(spec), prices_of(graph, shares))
    runs = [
        run_of(spec, plain, shares, reruns=in_chunks(graph)),
        run_of(spec, plain, Shares((0.7, 0.0, 0.3)), reruns=in_chunks(graph)),
        run_of(spec, stored_cut(plain), shares, regather=True, reruns=in_chunks(graph, 9)),
    ]
    for rank in worker_pools(3).run(jobs.step, runs):
        for error, where in rank:
            assert error < 1e-9, where


class Returning(Head):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.up(self.words(tokens))))
        return {"loss": self.loss(logits, labels), "logits": logits}


def shown(shares: Shares) -> list[str]:
    """In a worker: what comes back besides a loss in chunks. Lists what is wrong."""
    model, batch = Returning("plain").double(), batch_of()
    expected = model(**batch)
    expected["loss"].backward()
    captured = capture_call(model, batch)
    program = data_parallel(derive_rules(captured.graph), prices_of(captured.graph, shares))
    plan = replace(plan_of(program, shares), reruns=in_chunks(captured.graph))
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    pm = Parallel(model, batch, captured, plan, meet(plan))
    pm.train()
    wrong = []
    for _ in range(2):
        returned = pm(**batch)
        if not torch.allclose(lopsided.gather(returned["logits"]), expected["logits"]):
            wrong.append("logits")
        returned["loss"].backward()
        if not torch.allclose(next(p for n, p in pm.named_parameters() if "head" in n).grad, gradient):
            wrong.append("gradient")
        pm.zero_grad()
    returned = pm(**batch)
    try:
        returned["logits"].sum().backward()
        wrong.append("a way back")
    except TrainingError as error:
        if "have no way back" not in str(error):
            wrong.append(str(error))
    returned = pm(**batch)
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.mul_(2)
    try:
        lopsided.gather(returned["logits"])
        wrong.append("looked at too late")
    except TrainingError as error:
        if "before optimizer.step()" not in str(error):
            wrong.append(str(error))
    pm.close()
    return wrong


def test_logits_that_are_returned_are_made_when_looked_at(worker_pools: Callable[[int], WorkerPool]) -> None:
    assert worker_pools(2).run(shown, Shares((0.6, 0.4))) == [[], []]
