import pytest
import torch


@pytest.fixture
def one_thread():
    """Several threads add up a gradient in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
