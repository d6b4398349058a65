"""The errors that leave the library. Layer: none (imported by all, imports nothing)."""


class RecoverError(Exception):
    """The job cannot go on; the message is one sentence with the values and what to do."""


class NotLaunchedError(RecoverError, SystemExit):
    """The script was started by hand.

    Also a SystemExit, so that ``python script.py`` ends with the sentence, status 1 and no
    traceback.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = f"recover: {sentence}"
