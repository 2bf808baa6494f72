"""The fused loss against plain cross entropy."""

import torch
from torch import Tensor

from engine.training.loss import Teaching, head_loss


def _teaching(num_rows: int, generator: torch.Generator) -> Teaching:
    indices = torch.stack([torch.randperm(50, generator=generator)[:4] for _ in range(num_rows)])
    shares = torch.rand(num_rows, 4, generator=generator)
    return Teaching(
        indices, shares / shares.sum(1, keepdim=True), (torch.rand(num_rows, generator=generator) > 0.3).float()
    )


def test_loss_and_gradient_are_those_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1100, 16, generator=generator, requires_grad=True)  # more than two blocks of rows
    output_rows = torch.randn(50, 16, generator=generator)
    teaching = _teaching(1100, generator)
    head_loss(hidden, output_rows, teaching).mul(2.0).backward()
    assert hidden.grad is not None

    plain = hidden.detach().clone().requires_grad_()
    shares = torch.zeros(1100, 50).scatter(1, teaching.indices, teaching.shares)
    rows = -(shares * (plain @ output_rows.T).log_softmax(1)).sum(1)
    expected = (rows * teaching.weights).sum()
    expected.mul(2.0).backward()
    assert plain.grad is not None
    torch.testing.assert_close(head_loss(hidden, output_rows, teaching), expected)
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_products_in_bf16_stay_near_those_in_fp32() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(700, 16, generator=generator)
    output_rows = torch.randn(50, 16, generator=generator)
    teaching = _teaching(700, generator)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        given = hidden.clone().requires_grad_()
        losses.append(head_loss(given, output_rows.to(dtype), teaching))
        losses[-1].backward()
        assert given.grad is not None
        gradients.append(given.grad)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0.0)
    assert 0 < (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.02


def test_rows_of_no_weight_teach_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(8, 16, generator=generator, requires_grad=True)
    teaching = _teaching(8, generator)
    teaching = Teaching(teaching.indices, teaching.shares, torch.tensor([0.0] * 4 + [1.0] * 4))
    head_loss(hidden, torch.randn(50, 16, generator=generator), teaching).backward()
    assert hidden.grad is not None
    assert not hidden.grad[:4].any()
    assert hidden.grad[4:].any(dim=1).all()
