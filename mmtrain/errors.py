"""The one exception for what a user can mend: the launcher prints its message without a traceback and exits with 2."""


class UserError(Exception):
    """Wrong input. The message says what was seen, what is needed and how to get there."""
