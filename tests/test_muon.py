from copy import deepcopy

import pytest
import torch

from posx.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 11), (2, 11, 5)])
def test_orthogonalise_keeps_directions_and_evens_singular_values(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    made = orthogonalise(x)
    for given, got in zip(x, made, strict=True):
        u, _, v = torch.linalg.svd(given, full_matrices=False)
        along = u.mT @ got @ v.mT
        off = along - along.diagonal().diag()
        assert off.abs().max() < 1e-9  # the same singular vectors
        assert 0.3 < along.diagonal().min() <= along.diagonal().max() < 1.3


def test_same_law_as_torch() -> None:
    """torch works in bfloat16: 3 digits."""
    torch.manual_seed(1)
    given = [torch.randn(6, 6), torch.randn(12, 5), torch.randn(5, 12), torch.randn(6, 6)]
    steps = [[torch.randn_like(x) for x in given] for _ in range(4)]
    results = []
    for make in (Muon, torch.optim.Muon):
        parameters = [torch.nn.Parameter(x.clone()) for x in given]
        optimizer = make(parameters, lr=0.1, weight_decay=0.1)
        for gradients in steps:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        results.append(parameters)
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 0.02


def test_state_survives_a_round_trip() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0)
    parameter.grad = torch.randn(4, 6)
    optimizer.step()
    other = torch.nn.Parameter(parameter.detach().clone())
    copy = Muon([other], lr=0.1, weight_decay=0.0)
    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    other.grad = parameter.grad.clone()
    optimizer.step()
    copy.step()
    assert torch.equal(other, parameter)
