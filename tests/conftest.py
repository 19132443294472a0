"""What all tests share: Hypothesis profiles, the pool of ranks, and counts shown at the end of a run.

pytest                  # CI=1: the same examples every time
pytest --examples 1000  # more of them: the number of examples of a property test that names none
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks_pool import Pool

DISTRIBUTIONS = pytest.StashKey[dict[str, dict[str, Counter[str]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=100, help="examples of each Hypothesis test (default 100)")


def pytest_configure(config: pytest.Config) -> None:
    # No deadline: a trace takes as long as the machine is busy. In CI the examples follow from the test alone.
    settings.register_profile(
        "dtengine",
        deadline=None,
        print_blob=True,
        derandomize=bool(os.environ.get("CI")),
        max_examples=config.getoption("--examples"),
    )
    settings.load_profile("dtengine")
    config.stash[DISTRIBUTIONS] = {}
    os.environ["DTENGINE_CACHE"] = ""  # programs are traced: a test that wants a cache names a folder


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo ranks, started when first used and killed at the end of the session."""
    with Pool(8) as ranks:
        yield ranks


@pytest.fixture
def distribution(request: pytest.FixtureRequest) -> dict[str, Counter[str]]:
    """{property: Counter of what was drawn}, to be filled by a test; printed at the end of the run."""
    return request.config.stash[DISTRIBUTIONS].setdefault(request.node.name, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for test, counters in config.stash[DISTRIBUTIONS].items():
        terminalreporter.section(f"examples of {test}", sep="-")
        for name, counter in counters.items():
            drawn = "  ".join(f"{value} {count}" for value, count in sorted(counter.items()))
            terminalreporter.write_line(f"{name}: {drawn}")
