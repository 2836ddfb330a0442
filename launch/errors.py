"""The error a person can act on."""


class UserError(Exception):
    """Bad input or a missing resource, told in one line.

    The message names the file, field or record; what it was; what it should be; and what to do. Command lines print it
    after `error:` without a traceback and exit with status 2. Anything else that escapes is a bug and keeps its trace.
    """
