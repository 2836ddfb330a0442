"""Whether two mathematical expressions are equal, by math-verify. Runs in a killable worker, never in the trainer.

math-verify's own time limit is a SIGALRM, which raises outside the main thread; so it is off, and the worker that calls
this is killed from outside when it takes too long.
"""

import logging
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from math_verify import LatexExtractionConfig, parse, verify

from realvr.rewards.answers import THOUSANDS, normalise, plain

logging.getLogger("math_verify").setLevel(logging.ERROR)

MEMORY = 2 << 30  # bytes an expression may take: 10^(10^10) is one line of text
FUNCTIONS = (
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "log",
    "ln",
    "exp",
    "pi",
    "infty",
)
SYMBOLS = {
    "π": r"\pi ", "×": r"\times ", "÷": "/", "·": r"\cdot ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "±": r"\pm ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∪": r"\cup ", "∩": r"\cap ",
}  # fmt: skip
# Spellings of a unit (without a plural s) → one of them.
UNITS = {
    spelling: unit
    for unit, spellings in {
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb pound",
        "t": "ton tonne",
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "ml": "ml milliliter millilitre",
        "l": "l liter litre",
        "°": "deg degree",
        "%": "percent",
        "$": "dollar usd",
        "cent": "cent",
        "unit": "unit",
        "km/h": "km/h kmh",
        "m/s": "m/s",
    }.items()
    for spelling in spellings.split()
}
# A unit stands apart from its number, or is set as text, or is a degree sign; `5m` is five times m.
UNIT = re.compile(
    r"(?:\s+|\\[,;:! ]|~)*"
    r"(?:\\(?:text|mathrm|mbox|rm)\s*\{\s*(?P<set>[A-Za-z/]+)\.?\s*\}|(?<=[\s~])(?P<apart>[A-Za-z/]+)\.?"
    r"|(?P<sign>°C?|\^\s*\{?\s*\\circ\s*\}?|\\degree))(?P<power>\s*\^\s*\{?[23]\}?)?\s*$"
)


class NotMaths(ValueError):
    """The text is not an expression."""


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit in one spelling or "")."""
    found = UNIT.search(text)
    if not found or not text[: found.start()].strip():
        return text, ""
    if found["sign"]:
        return text[: found.start()].strip(), "°"
    name = (found["set"] or found["apart"]).lower()
    unit = UNITS.get(name) or UNITS.get(name.removesuffix("s"))
    if unit is None:
        return text, ""
    power = re.sub(r"\D", "", found["power"] or "")
    return text[: found.start()].strip(), unit + power


def tidy(text: str) -> tuple[str, str]:
    """Answer text → (LaTeX for math-verify, unit). Raises NotMaths for prose, spaced numbers, dangling operators."""
    text = normalise(text).strip().strip("$").strip()
    text = re.sub(r"^\\[\[(]|\\[\])]$", "", text).strip().rstrip(".").strip()
    text = re.sub(r"^\\?\$\s*", "", text)
    text, unit = split_unit(text)
    text = re.sub(r"\\(?:left|right|big|Big|displaystyle)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[,;:!]|~", " ", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    for sign, latex in SYMBOLS.items():
        text = text.replace(sign, latex)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({'|'.join(FUNCTIONS)})(?![a-zA-Z])", r"\\\1 ", text)
    text = text.replace("**", "^")
    text = THOUSANDS.sub(lambda m: m.group().replace(",", ""), text) if "(" not in text and "[" not in text else text
    text = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d ])", lambda m: m.group().replace(" ", ""), text)
    text = re.sub(r"(?<![\w\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}", text)
    text = re.sub(r"(?<![\d./^{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d./^{}])(\d+)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = text.strip()
    bare = re.sub(r"\\[a-zA-Z]+", " ", text)
    if not text or re.search(r"[A-Za-z]{2,}", re.sub(r"[A-Za-z](?=\s*=)", "", bare)):
        raise NotMaths(f"{text!r} is not an expression")
    if re.search(r"\d\s+[\d.]", text) or re.search(r"(?:[+\-*/^_=<>,]|\\times|\\cdot)$", text):
        raise NotMaths(f"{text!r} is not one expression")
    return text, unit


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let this process's address space grow by at most `extra` bytes: beyond that Python raises MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + extra
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def equal(gold: str, answer: str) -> tuple[bool, str]:
    """Whether two answers are the same mathematically, and why not.

    A gold answer that is prose ("no solution") is compared as text; prose never equals an expression. Raises
    MemoryError if an expression is too big to evaluate.
    """
    try:
        wanted, wanted_unit = tidy(gold)
    except NotMaths:
        same = plain(gold) == plain(answer)
        return same, "" if same else "not the same text"
    try:
        given, unit = tidy(answer)
    except NotMaths as error:
        return False, str(error)
    if unit and wanted_unit and unit != wanted_unit:
        return False, f"unit {unit} where {wanted_unit} is wanted"
    if given == wanted:
        return True, ""
    with memory_limit(MEMORY):
        parsed = [read(x) for x in (wanted, *statements(given))]
        if not all(parsed[1:]):
            return False, f"{given!r} does not parse"
        same = all(verify(parsed[0], x, timeout_seconds=None) for x in parsed[1:])
    return same, "" if same else "not equal"


def read(latex: str) -> list:
    """math-verify's reading of one expression; empty if there is none."""
    return parse(
        f"${latex}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )


def statements(latex: str) -> list[str]:
    """The sides of an equation between numbers (2+3=5), each of which must hold: math-verify reads only the last one.

    Anything else, x=5 too, is one statement.
    """
    sides = latex.split("=")
    variables = re.search(r"[A-Za-z]", re.sub(r"\\[a-zA-Z]+", " ", sides[0]))
    return [latex] if len(sides) < 2 or variables or not all(side.strip() for side in sides) else sides
