import pytest
from schedules import LAYERS, Schedule, Worker


@pytest.fixture
def layers():
    return LAYERS


@pytest.fixture
def schedule():
    return Schedule


@pytest.fixture
def worker():
    return Worker
