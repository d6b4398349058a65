"""What each rank of a test runs.

``python -m tests.mpi.rank_main MODULE:FUNCTION FOLDER ARGUMENTS``
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Run the function, write what it returned or raised, and end as survivors can bear it."""
    function, folder, arguments = sys.argv[1:]
    stem = Path(folder) / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}"
    log = os.open(stem.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stem.with_suffix(".pid").write_text(str(os.getpid()))
    module, name = function.split(":")
    try:
        value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        write(stem, {"value": value})
    except BaseException as error:
        traceback.print_exc()
        write(stem, {"error": "".join(traceback.format_exception_only(error)).strip()})
        die()
    sys.stdout.flush()
    os._exit(0)  # no MPI_Finalize: it can hang after a failure


def write(stem: Path, result: dict[str, object]) -> None:
    """Write this rank's result, whole or not at all."""
    part = stem.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(stem.with_suffix(".json"))


def die() -> NoReturn:
    """Die at once, as hardware does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


if __name__ == "__main__":
    main()
