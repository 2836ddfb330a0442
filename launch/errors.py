"""The error a person can act on."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a missing resource, told in one line.

    The message names the file, field or record; what it was; what it should be; and what to do. Command lines print it
    after `error:` without a traceback and exit with status 2. Anything else that escapes is a bug and keeps its trace.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, else the list of them (the first 12)."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(sorted(known)[:12]) + (", …" if len(known) > 12 else "")
