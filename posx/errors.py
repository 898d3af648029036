"""The exceptions that a user is meant to see as a sentence."""


class UserError(ValueError):
    """Something the user can put right: printed as one line, exit code 2, no traceback.

    The text says what was given, what is allowed and what to do.
    """

    code = 2


class RunFailed(Exception):
    """A run failed or was stopped; `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text, code)  # both, so that it comes whole from another process
        self.text, self.code = text, code

    def __str__(self) -> str:
        return self.text
