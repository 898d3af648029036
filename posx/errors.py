"""The one exception that a user is meant to see as a sentence."""


class UserError(ValueError):
    """Something the user can put right: printed as one line, exit code 2, no traceback.

    The text says what was given, what is allowed and what to do.
    """
