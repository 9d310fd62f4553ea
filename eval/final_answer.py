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
_MOST_CHARACTERS = 100  # of a number: models that loop write thousands of digits
# Not what ends a name or a longer number: x2, CO2, 1.2.3.
_NUMBER = re.compile(
    r"(?<![^\W_])(?<!\d\.)(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"  # 12; 1,234.50; .5
    r"(?:[eE][-+]?\d{1,3}(?!\w)|/0*[1-9]\d*)?"  # 2e6; 1/2
)
# What makes it negative: -5, -$5, $-5; not 10-5, which is a range or a difference, and not - 5, which is one or a list.
_SIGN = re.compile(r"(?:^|[^\w)\]}%])[-\u2212\u2013][$€£¥]?$")  # hyphen, minus sign, dash


def final_number(text: str) -> Fraction | None:
    """Return the first number behind the last "####" of a text, else its last number; None without any.

    Currency signs, units, thousands commas, decimals, fractions and signs are understood: "$1,234.50", "12 km", "-3",
    "1/2". Numbers in words are not.
    """
    _, mark, behind = text.rpartition(_MARK)
    marked = _numbers(behind) if mark else []
    numbers = _numbers(text)
    return marked[0] if marked else numbers[-1] if numbers else None


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

        The interval resamples questions, both answers of one together. Of one question there is none.

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
            "difference_interval": micro_interval(differences),
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
