import torch


def test_uninitialised_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.zeros(1).new_empty(3).isnan().all()
