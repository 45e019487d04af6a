"""Samples of linear algebra on stacks of matrices."""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


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
