import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tests build out of the user's cache, but share it within a session."""
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
