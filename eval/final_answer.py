"""The final number of an answer, and how many are right: GSM8K's way, where a reference ends with "#### 12"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from specdec.eval.ratios import micro_interval

_MARK = "####"
# In an answer, with a number directly behind it: "#### **$12**", not "#### Step 2".
_MARKED = re.compile(r"(?<!#)####(?!#)(?=(?:[^\w\n#]|_|\\boxed)*\d)")
_ASIDE = re.compile(r"(?<=\S)\s*\([^()]*\)[^\w()]*$")  # at the end of a line: 12 (3 of 15)
# Behind the number that a Markdown heading begins with: 1. Count; 2) Add; 3: Result; 4 - Result; 5th day.
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b|[\s*_]*(?::|(?:[.)]|\s[-\u2013\u2014])\W*\w)")
_MOST_CHARACTERS = 100  # of a number: models that loop write thousands of digits
_LEAST_QUESTIONS = 16  # of an interval: most differences are 0, and fewer say too little of how they scatter
# Not what ends a name, a longer number or a power: x2, CO2, 1.2.3, m^2.
_NUMBER = re.compile(
    r"(?<![^\W_])(?<!\d\.)(?<!\^)(?<!\^\{)"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"  # 12; 1,234.50; .5
    r"(?:[eE][-+]?\d{1,3}(?![^\W_])|/0*[1-9]\d*)?"  # 2e6; 1/2
)
# What makes it negative: -5, -$5, $-5; not 10-5, which is a range or a difference, and not - 5, which is one or a list.
_SIGN = re.compile(r"(?:^|[^\w)\]}%]|_)[-\u2212\u2013][$€£¥]?$")  # hyphen, minus sign, dash


def final_number(text: str) -> Fraction | None:
    """Return the number behind the last "####" that has one, where it can be an answer, else a text's last number.

    Units may follow in the line, but no other number, except in brackets at its end: "#### 3 + 4 = 7" and "#### 1. Add"
    are Markdown headings. Currency signs, units, thousands commas, decimals, fractions and signs are understood:
    "$1,234.50", "12 km", "-3", "1/2". Numbers in words are not. None if there is no number.
    """
    marks = list(_MARKED.finditer(text))
    marked = _alone(text[marks[-1].end() :].partition("\n")[0]) if marks else None
    numbers = _numbers(text) if marked is None else [marked]
    return numbers[-1] if numbers else None


def _alone(line: str) -> Fraction | None:
    """Return the number that a line begins with, if it is the only one there and not that of a heading."""
    line = _ASIDE.sub("", line)
    found = list(_NUMBER.finditer(line))
    numbers = _numbers(line)
    return numbers[0] if len(found) == len(numbers) == 1 and not _ORDINAL.match(line, found[0].end()) else None


def reference_number(reference: str | None) -> Fraction | None:
    """Return the number behind "####" of a reference; None if it is not of that kind."""
    numbers = _numbers(reference.rpartition(_MARK)[2]) if reference is not None and _MARK in reference else []
    return numbers[0] if numbers else None


def _numbers(text: str) -> list[Fraction]:
    text = text.replace("{,}", ",")  # LaTeX's thousands
    values = []
    for number in _NUMBER.finditer(text):
        if len(number[0]) <= _MOST_CHARACTERS:
            above, _, below = number[0].replace(",", "").partition("/")
            value = Fraction(above) / int(below or 1)
            is_negative = _SIGN.search(text[max(0, number.start() - 3) : number.start()])
            values.append(-value if is_negative else value)
    return values


@dataclass(frozen=True, slots=True)
class FinalAnswers:
    """Which of the same questions two sets of answers get right."""

    subject: list[bool]
    reference: list[bool]  # the answers it is compared with

    def summary(self) -> dict[str, Any]:
        """Return both accuracies, their difference with its paired 95 % interval over questions, and McNemar's test.

        The interval resamples questions, both answers of one together. Of few questions there is none.

        Source: McNemar 1947, the exact two-sided form.
        """
        pairs = list(zip(self.subject, self.reference, strict=True))
        only_subject = sum(a and not b for a, b in pairs)
        only_reference = sum(b and not a for a, b in pairs)
        count = len(pairs)
        differences = [(float(a) - float(b), 1.0) for a, b in pairs]
        return {
            "num_questions": count,
            "accuracy": sum(self.subject) / count if count else None,
            "accuracy_lossless": sum(self.reference) / count if count else None,
            "difference": (only_subject - only_reference) / count if count else None,
            "difference_interval": micro_interval(differences, least=_LEAST_QUESTIONS),
            "num_only_here": only_subject,
            "num_only_lossless": only_reference,
            "p_value": mcnemar(only_subject, only_reference),
        }


def mcnemar(first: int, second: int) -> float:
    """Return the exact two-sided p-value of two counts of questions that only one side gets right."""
    total, fewer = first + second, min(first, second)
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(fewer + 1)) / 2**total)


def grade(texts: Sequence[str], numbers: Sequence[Fraction | None]) -> list[bool]:
    """Return which texts end with the right number, of the questions that have one."""
    return [final_number(text) == number for text, number in zip(texts, numbers, strict=True) if number is not None]
