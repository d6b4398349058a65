"""Start a job's processes, watch them, and end with the right status. Layer: launch.

``run`` is ``recover run``; ``rank`` is what a rank may ask; ``doctor`` looks whether this machine
is able to run a job. The names below are imported when they are used: every rank imports this
package, and none of them needs the launcher.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recover.launch.display import Display, PlainDisplay
    from recover.launch.launcher import launch, run
    from recover.launch.outcome import Outcome, RankEnd
    from recover.launch.spec import LaunchSpec, Timeouts

__all__ = [
    "Display",
    "LaunchSpec",
    "Outcome",
    "PlainDisplay",
    "RankEnd",
    "Timeouts",
    "launch",
    "run",
]

_HOMES = {
    "Display": "display",
    "PlainDisplay": "display",
    "launch": "launcher",
    "run": "launcher",
    "Outcome": "outcome",
    "RankEnd": "outcome",
    "LaunchSpec": "spec",
    "Timeouts": "spec",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
