"""For all tests: no clock judges them, none takes more than one core's threads, those that start services come first, and
those of the real vLLM run where it is installed (`make test-vllm`)."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey, storage_key
from paceline.host.resources import usable_cores

HERE = Path(__file__).parent
MAX_WORKERS = 4
LONG = ("hosts", "chaos", "weights", "e2e")
"""Folders whose files take longest, longest first."""

# Read when torch is imported, here and in every process that a test starts: workers that compute with all cores each
# would slow each other down, and numbers would depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests start hundreds of processes; each would compile our modules anew where the environment forbids caches.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test needs the Hugging Face hub; without a network each look there would wait for its retries. Tests of the hub's
# absence see the same errors.
for _VARIABLE in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_VARIABLE, "1")

# Torch asks a name server for the name of each address that it connects to, 127.0.0.1 too. No test needs the answer, and
# a lost one would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# One token for every coordinator that a test starts as a process, for its workers and for the clients here. Each process of
# pytest-xdist has its own, because the files that run beside each other must not find each other's.
_FOLDER = tempfile.mkdtemp(prefix="paceline-token-")
_TOKEN = Path(_FOLDER, "token")
os.environ["PACELINE_TOKEN_FILE"] = str(_TOKEN)
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

# Bundles of the tests' runs are unpacked in a folder that goes with the tests.
if "PACELINE_BUNDLE_CACHE" not in os.environ:
    _BUNDLES = tempfile.mkdtemp(prefix="paceline-bundles-")
    os.environ["PACELINE_BUNDLE_CACHE"] = _BUNDLES
    atexit.register(shutil.rmtree, _BUNDLES, ignore_errors=True)

# A busy machine must not fail a test, and a failure must be due to the change that meets it: no deadline, the same
# examples every time.
settings.register_profile("paceline", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")


@pytest.fixture(autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """A model that one process divides makes a process group of one, which the next test must not find."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextlib.contextmanager
def _environment_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def environment_of_the_next_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """As `environment_of_the_next_test`, for what a fixture of a whole file calls. A token of the file before is removed,
    because clients with a token refuse the servers of tests that know none. The files of e2e share a cluster."""
    if "e2e" not in request.path.parts:
        _TOKEN.unlink(missing_ok=True)
    with _environment_put_back():
        yield


@pytest.fixture(autouse=True)
def environment_of_the_next_test() -> Iterator[None]:
    """Options of our commands set variables for child processes, also where a test calls a command in this process; the
    next test's services must not read them."""
    with _environment_put_back():
        yield


@pytest.fixture(autouse=True)
def servers_without_a_guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of tests that know no token prove nothing; outside the tests of access they are called all the same."""
    if "access" not in request.path.parts:
        monkeypatch.setattr("paceline.calls.token.without_token", lambda path=None: ())
        monkeypatch.setattr("paceline.calls.proof.tls_folder", lambda: request)


@pytest.fixture
def given_key(monkeypatch: pytest.MonkeyPatch) -> StorageKey:
    """A storage key in the environment of this process and of those that it starts."""
    monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())
    key = storage_key()
    assert key is not None
    return key


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser; what needs one is skipped where playwright or Chromium is missing."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("pages are not tested: install chromium (apt-get install chromium) and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes that `-n auto` starts: none for tests of one file, which stay together; else three for
    two cores, because many tests wait for processes and timeouts; with more, programs with a time limit get no core.
    """
    files = {str(argument).partition("::")[0] for argument in config.args}
    if len(files) == 1 and all(name.endswith(".py") for name in files):
        return 0
    return min(usable_cores() * 3 // 2, MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first, so that no process is left with one when the others have ended. Skips what needs vLLM, with
    the command that runs it; where it runs, it and what it imports warn about themselves."""
    order = {folder: place for place, folder in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.relative_to(HERE).parts[0], len(LONG)))
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
