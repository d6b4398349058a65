"""The errors that leave the library. Layer: none (imported by all, imports nothing)."""


class RecoverError(Exception):
    """The job cannot go on; the message is one sentence with the values and what to do."""


class NotLaunchedError(RecoverError, SystemExit):
    """The script was started by hand.

    Also a SystemExit, so that ``python script.py`` ends with the sentence and no traceback.
    """
