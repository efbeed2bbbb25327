import pytest
from make_tiny_dsa import TinyDsa, write


@pytest.fixture(scope="session")
def tiny_dsa(tmp_path_factory):
    """Makes model folders by their settings, each once."""
    folders = {}

    def make(**settings):
        key = TinyDsa(**settings)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("model")
            write(key, folders[key])
        return folders[key]

    return make
