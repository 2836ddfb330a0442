"""From a completion to the answer it gives: one extractor for training and evaluation.

`reward` mode accepts exactly one `<answer>…</answer>` block. `eval` mode takes the last block, else the last
`\\boxed{}`, else, for multiple choice, a completion that is nothing but an option or says "the answer is X". What
cannot be read is no answer; nothing is ever guessed.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["reward", "eval"]
Kind = Literal["text", "choice", "math"]

BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TAG = re.compile(r"</?answer>")
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")

VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# What NFKC leaves alone though a keyboard has it: dashes, quotes, CJK punctuation.
PLAIN = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "⁄": "/", "∕": "/", "。": ".", "、": ",",
        "‘": "'", "’": "'", "“": '"', "”": '"', "【": "[", "】": "]", "〔": "(", "〕": ")", "∗": "*",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Extraction:
    """The answer's text, or None and why there is none."""

    text: str | None
    reason: str = ""


def normalise(text: str) -> str:
    """NFKC (full-width forms to ASCII) with what NFKC would spoil or leave mapped first; invisible characters go.

    Superscripts become powers (x² → x^{2}, not x2) and ½ keeps its value after a whole number (1½ → (1+1/2)).
    """
    text = re.sub(rf"(\d+)\s?([{VULGAR}])", r"(\1+\2)", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: "^{" + m.group().translate(SUPERSCRIPT) + "}", text)
    text = unicodedata.normalize("NFKC", text).translate(PLAIN)
    return "".join(c for c in text if unicodedata.category(c) != "Cf")


def block(completion: str) -> str | None:
    """Text inside the only `<answer>…</answer>` of a completion, stripped; None if there is not exactly one.

    A second tag of either kind, an empty block, and a block holding a special token (it would be read as that token
    when the answer is tokenised again) make it unreadable. The text is otherwise as written.
    """
    found = strict_block(completion)
    return found.text


def strict_block(completion: str) -> Extraction:
    """As `block`, with the reason."""
    tags = TAG.findall(completion)
    if tags != ["<answer>", "</answer>"]:
        return Extraction(None, f"not exactly one answer block ({tags.count('<answer>')} opened)")
    return contents(BLOCK.search(completion).group(1))


def contents(text: str) -> Extraction:
    if SPECIAL.search(text):
        return Extraction(None, "special token inside the answer")
    return Extraction(text.strip()) if text.strip() else Extraction(None, "empty answer")


def last_box(text: str) -> Extraction | None:
    """Content of the last `\\boxed{}` or `\\fbox{}`; None if there is no box; no text if the last one is not closed.

    A cut-off last box means that the completion was revising its answer: an earlier box does not stand in for it.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 0
    for i in range(start, len(text)):
        if text[i] in "{}" and not (i and text[i - 1] == "\\"):
            depth += 1 if text[i] == "{" else -1
        if depth == 0:  # closed, or no brace follows at all
            return contents(text[start + 1 : i]) if i > start else Extraction(None, "box without braces")
    return Extraction(None, "box not closed")


def inner(text: str) -> Extraction:
    """The box inside a text where there is one, however nested; else the text."""
    for _ in range(4):
        box = last_box(text)
        if box is None or box.text is None:
            return box or Extraction(text)
        text = box.text
    return Extraction(text)


def extract(completion: str, kind: Kind, mode: Mode, options: Sequence[str] = ()) -> Extraction:
    """The answer of a completion as normalised text; for `choice` the option's letter.

    options: texts of the options in order (A, B, …), where known: only their letters count, and an option's text
    stands for its letter.
    """
    text = normalise(completion)
    if mode == "reward":
        found = strict_block(text)
    elif "<answer>" in text or "</answer>" in text:
        blocks = BLOCK.findall(text)
        closed = blocks and text.rfind("</answer>") > text.rfind("<answer>")
        found = contents(TAG.sub("", blocks[-1])) if closed else Extraction(None, "answer block not closed")
    else:
        found = last_box(text)
        if found is None and kind == "choice":
            return choice(SPECIAL.sub(" ", text), options)
        found = found or Extraction(None, "no answer block and no box")
    if found.text is None:
        return found
    found = inner(found.text)
    return choice(found.text, options) if kind == "choice" and found.text is not None else found


# Commands that only dress their argument: \text{B}, \mathbf{B}.
DRESS = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|operatorname|mbox)\s*\{([^{}]*)\}")
LETTER = re.compile(r"[(\[{\"']?\s*([A-Za-z])\s*[)\]}\"']?\s*[.):,]?")
LABELLED = re.compile(
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]\s*[.:,]?|([A-Za-z])\s*(?:[.):,]|\s-))\s+(?=\S)|([A-Z])[).:](?=[^\s\d.])"
)
ANNOUNCED = re.compile(
    r"(?:\b(?i:answer|option|choice)\b(?i:\s+(?:is|would\s+be|should\s+be|must\s+be|will\s+be))?|答案(?:是|为|选)?)"
    r"\s*(?:[:=]|-(?=\s))?\s*(?i:(?:the\s+)?(?:option|choice|letter)\s+)?"
    r"[(\[\"']?\s*([A-Z])(?![\w'])\s*[)\]\"']?"
    # What may follow the letter; a word may not, else "the answer is A blue cube" would be A.
    r"(?=\s*(?:$|[.,;:!()<]|-\s|(?:because|since|as|for|which|where|due|given|so)\b))"
)
ANOTHER = re.compile(
    r"\s*(?:(?:[,;/&]|\b(?:or|and|nor)\b)\s*)+[(\[]?([A-Z])[)\]]?(?=\s*(?:$|[.,;:!)\]/&]|(?:or|and)\b))"
)


def undress(text: str) -> str:
    """Drop markdown emphasis, dollar signs and LaTeX commands that only set a font; collapse white space."""
    for _ in range(3):
        text = DRESS.sub(r"\1", text)
    text = re.sub(r"\*\*|__|`|\$|(?<!\w)[*_]|[*_](?!\w)", "", text)
    return " ".join(text.split())


def choice(text: str, options: Sequence[str] = ()) -> Extraction:
    """The option letter a text chooses: the letter alone, "the answer is X" (the last), or "X. text of the option".

    Two letters ("A or B"), an article ("A blue cube …") and anything else are no choice.
    """
    text = undress(text)
    allowed = {chr(65 + i) for i in range(len(options))} if options else {chr(65 + i) for i in range(26)}

    def known(letter: str) -> Extraction:
        return Extraction(letter) if letter in allowed else Extraction(None, f"{letter} is not an option")

    if whole := LETTER.fullmatch(text):
        return known(whole.group(1).upper())
    same = [i for i, option in enumerate(options) if plain(option) == plain(text)]
    if len(same) == 1:
        return Extraction(chr(65 + same[0]))
    announced = list(ANNOUNCED.finditer(text))
    if announced:
        last = announced[-1]
        if ANOTHER.match(text, last.end()):
            return Extraction(None, "more than one option")
        return known(last.group(1))
    if label := LABELLED.match(text):
        letter = next(g for g in label.groups() if g).upper()
        return labelled(letter, text[label.end() :], options) or known(letter)
    return Extraction(None, "no option named")


def labelled(letter: str, rest: str, options: Sequence[str]) -> Extraction | None:
    """What forbids to read "X. rest" as X: a second label, a second letter, the text of another option."""
    others = [m.group(1) for m in re.finditer(r"(?:^|[\s,;(])([A-H])[).:](?=\s|$)", rest)]
    if any(other != letter for other in others) or ANOTHER.match(", " + rest) or LETTER.fullmatch(rest):
        return Extraction(None, "more than one option")
    for i, option in enumerate(options):
        if plain(option) == plain(rest) and chr(65 + i) != letter:
            return Extraction(None, "letter and text name different options")
    return None


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBER_WORDS = {word: str(i) for i, word in enumerate(WORDS)}
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def plain(text: str) -> str:
    """Text as it is compared: case-folded, undressed, no quotes, end punctuation or leading article; numbers one way.

    Numbers: three → 3, 1,000 → 1000, 3.0 → 3. Nothing is dropped from the middle: "the red one" is not "red".
    """
    text = undress(normalise(text)).casefold()
    before = None
    while text != before:
        before = text
        text = text.strip().strip("\"'").rstrip(".!?,;:").strip()
    text = re.sub(r"^(?:a|an|the)\s+(?=\S)", "", text)
    text = THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    text = re.sub(r"(?<![\w.])([+-]?\d+)\.0+(?![\w.])", r"\1", text)
    text = re.sub(r"(?<![\w.])\+(?=\d)", "", text)
    return " ".join(NUMBER_WORDS.get(word, word) for word in text.split())
