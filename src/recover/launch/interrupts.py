"""Requests to end, as signals. Layer: launch."""

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Collects SIGINT, SIGTERM and SIGHUP while it is entered; outside the main thread, nothing.

    A signal that is ignored (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
