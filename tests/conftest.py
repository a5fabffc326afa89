import signal

import hypothesis
import pytest

# A shell's background job begins with Ctrl-C ignored, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine can take any time for an example: a law is broken by a wrong value, never by a slow one.
hypothesis.settings.register_profile("cotrain", deadline=None)
hypothesis.settings.load_profile("cotrain")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tests build out of the user's cache, but share it within a session."""
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
