"""Muon's step: all directions of a matrix move alike."""

import pytest
import torch

from engine.training.optimizer import orthogonalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 24), (96, 24), (24, 96)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator)
    result = orthogonalise(matrix, dtype)
    assert result.dtype == torch.float32
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    along = (left.T @ result @ right.T).diagonal()  # what it moves along the matrix's own directions
    torch.testing.assert_close(along.square().sum(), result.square().sum(), rtol=0.02, atol=0.0)
