"""Linear algebra on stacks of matrices: the stack may be cut, a matrix stays whole."""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.ops.op import Call, Op, entries
from lopsided.ops.sample import Draw, Sample, sample


def factored(call: Call) -> str:
    """Each result belongs to one matrix of the stack: a matrix, a vector or a number."""
    stack = len(call.shapes[0]) - 2
    results = [
        " ".join(["...", *(f"Y{k}{d}" for d in range(len(shape) - stack))]) for k, shape in enumerate(call.results)
    ]
    return f"f[... X Z] -> {', '.join(results)}"


def solve(call: Call) -> str:
    """Linear in the right-hand side, whose columns are independent."""
    left = call.arg("left") is not False
    # Triangular systems have no vectors; others where the shape leaves no doubt, or is that of one per matrix.
    is_vector = len(call.shapes[1]) == 1 or call.shapes[1] == call.shapes[0][:-1]
    if is_vector and "triangular" not in call.node.op:
        return "f[... X Z] * ... X -> ... Z"
    return "f[... X Z] * ... X k -> ... Z k" if left else "f[... X Z] * ... k Z -> ... k X"


_FACTORED = (
    "linalg_inv inverse linalg_cholesky cholesky linalg_det det logdet linalg_slogdet slogdet linalg_pinv"
    " linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_eigvalsh linalg_svdvals"
    " linalg_eigh linalg_qr linalg_svd"
)

LINALG: dict[str, Op] = {
    **entries(_FACTORED, Op(factored)),
    "aten.linalg_solve": Op(solve),
    "aten.linalg_solve_triangular": Op(solve),
    "aten.cholesky_solve": Op("... X k * f[... X Z] -> ... X k"),
}


# Samples


def samples(draw: Draw) -> Iterator[Sample]:
    for name in (
        "linalg_inv",
        "inverse",
        "linalg_cholesky",
        "cholesky",
        "linalg_det",
        "det",
        "logdet",
        "linalg_slogdet",
    ):
        yield sample(f"aten.{name}.default", draw.well_conditioned(5, n=4))
    for name in ("slogdet", "linalg_matrix_exp", "matrix_exp", "linalg_eigvalsh", "linalg_svdvals"):
        yield sample(f"aten.{name}.default", draw.well_conditioned(5, n=4))
    for name in ("linalg_matrix_power", "matrix_power"):
        yield sample(f"aten.{name}.default", draw.well_conditioned(5, n=4), 3)
    yield sample("aten.linalg_pinv.default", draw.real(5, 4, 3), 1e-6)
    yield sample("aten.linalg_eigh.default", draw.well_conditioned(5, n=3).detach())
    yield sample("aten.linalg_qr.default", draw.real(5, 6, 4))
    yield sample("aten.linalg_svd.default", draw.constant(5, 6, 4), False)
    yield sample("aten.linalg_solve.default", draw.well_conditioned(5, n=4), draw.real(5, 4, 3))
    yield sample("aten.linalg_solve.default", draw.well_conditioned(n=4), draw.real(4))
    yield sample("aten.linalg_solve.default", draw.well_conditioned(5, n=4), draw.real(5, 3, 4), left=False)
    yield sample("aten.linalg_solve.default", draw.well_conditioned(5, n=4), draw.real(5, 4))
    yield sample("aten.linalg_solve.default", draw.well_conditioned(5, n=4), draw.real(4, 3))
    yield sample("aten.linalg_solve.default", draw.well_conditioned(5, n=4), draw.real(4))
    yield sample("aten.linalg_solve.default", draw.well_conditioned(n=4), draw.real(5, 4, 3))
    triangle = draw.well_conditioned(5, n=4).detach().tril().requires_grad_()
    yield sample("aten.linalg_solve_triangular.default", triangle, draw.real(5, 4, 3), upper=False)
    yield sample("aten.linalg_solve_triangular.default", triangle, draw.real(4, 3), upper=False)
    square = draw.well_conditioned(4, n=4).detach().tril().requires_grad_()
    yield sample("aten.linalg_solve_triangular.default", square, draw.real(4, 4), upper=False)
    yield sample("aten.cholesky_solve.default", draw.real(5, 4, 3), triangle)
