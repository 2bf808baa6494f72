"""The closed form of coupled acceptance against the engine's own noise."""

import numpy as np
import torch

from engine.sampling.noise import gumbel_noise
from engine.training.coupling import coupled_acceptance, optimal_acceptance

NUM_DRAWS = 20_000


def _distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64) * 2
    target, draft = logits.softmax(2)
    draft[1, 3:] = 0  # a reduced vocabulary
    draft[1] /= draft[1].sum()
    draft[2] = target[2]
    return target, draft


def test_closed_form_is_the_frequency_of_equal_draws() -> None:
    target, draft = _distributions()
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(target.numpy()), np.log(draft.numpy())
    noise = np.stack([gumbel_noise(7, position, np.arange(12)) for position in range(NUM_DRAWS)])
    for row, expected in enumerate(coupled_acceptance(target, draft).tolist()):
        same = ((log_p[row] + noise).argmax(1) == (log_q[row] + noise).argmax(1)).mean()
        assert abs(same - expected) < 5 * (0.25 / NUM_DRAWS) ** 0.5


def test_coupling_never_beats_the_optimum_and_reaches_it_for_equal_distributions() -> None:
    target, draft = _distributions()
    optimum, coupled = optimal_acceptance(target, draft), coupled_acceptance(target, draft)
    assert (coupled <= optimum + 1e-12).all()
    assert (coupled >= optimum / 2).all()
    torch.testing.assert_close(coupled[2], torch.tensor(1.0, dtype=torch.float64))
