"""Samples of norms: with and without scale and shift, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.ops.samples.draw import Draw
from lopsided.ops.validator import Sample, sample


def samples(draw: Draw) -> Iterator[Sample]:
    layer = "aten.layer_norm.default"
    yield sample(layer, draw.real(5, 4, 6), [6], draw.real(6), draw.real(6))
    yield sample(layer, draw.real(5, 4, 6), [6], draw.real(6))
    yield sample(layer, draw.real(5, 4, 6), [4, 6])
    yield sample("aten.native_layer_norm.default", draw.real(5, 6), [6], draw.real(6), draw.real(6), 1e-5)
    yield sample("aten.rms_norm.default", draw.real(5, 4, 6), [6], draw.real(6))
    yield sample("aten.rms_norm.default", draw.real(5, 6), [6], None, 1e-3)
    yield sample("aten.group_norm.default", draw.real(5, 8, 3), 4, draw.real(8), draw.real(8))
    yield sample("aten.group_norm.default", draw.real(5, 6, 3, 4), 1)
    yield sample("aten.group_norm.default", draw.real(5, 4), 2, draw.real(4))
    yield sample("aten.native_group_norm.default", draw.real(5, 8, 3), draw.real(8), draw.real(8), 5, 8, 3, 4, 1e-5)
    running = (draw.constant(4), draw.positive(4, grad=False))
    own = "lopsided.batch_norm.default"
    yield sample(own, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, 0.1, 1e-5)
    yield sample(own, draw.real(5, 4), None, None, *running, 0.1, 1e-5)
    batch = "aten.batch_norm.default"
    yield sample(batch, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, False, 0.1, 1e-5, False)
    yield sample(batch, draw.real(5, 4, 6), None, None, *running, False, 0.1, 1e-5, False)
    yield sample(batch, draw.real(5, 4), draw.real(4), draw.real(4), None, None, True, 0.1, 1e-5, False)
    instance = "aten.instance_norm.default"
    yield sample(instance, draw.real(5, 4, 6), draw.real(4), draw.real(4), None, None, True, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 3, 6), None, None, None, None, True, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 6), draw.real(4), draw.real(4), *running, False, 0.1, 1e-5, False)
    yield sample(instance, draw.real(5, 4, 6), None, None, *running, False, 0.1, 1e-5, False)
    yield sample("aten._weight_norm.default", draw.real(5, 4, 3), draw.real(5, 1, 1))
    yield sample("aten._weight_norm.default", draw.real(5, 4, 3), draw.real(), -1)
    yield sample("aten._weight_norm.default", draw.real(5, 4), draw.real(1, 1), -1)
    yield sample("aten._weight_norm.default", draw.real(4, 5), draw.real(1, 5), 1)
    yield sample("aten._weight_norm_interface.default", draw.real(5, 4), draw.real(5, 1))
