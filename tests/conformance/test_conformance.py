"""One suite, two ports: the simulator must be right about what it assumes of real processes."""

from collections.abc import Callable

import pytest

from recover.core.mesh import Place
from tests.conformance import real, virtual
from tests.conformance.programs import Scenario, Value
from tests.conformance.scenarios import DISTURBED, QUIET

Port = Callable[[Scenario], dict[Place, Value]]


@pytest.mark.parametrize(
    "port", [pytest.param(virtual.run, id="virtual"), pytest.param(real.run, id="real")]
)
@pytest.mark.parametrize("scenario", [*QUIET, *DISTURBED], ids=str)
def test_every_survivor_returns_what_the_scenario_says(scenario: Scenario, port: Port) -> None:
    values = port(scenario)
    assert values == {place: scenario.expected(place) for place in scenario.survivors}
