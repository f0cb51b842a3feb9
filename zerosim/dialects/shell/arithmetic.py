"""Whole numbers in a shell's `$(( ))`: + - * / %, brackets and variables."""

from __future__ import annotations

import re

_MOST = 2**63


def is_plain(text: str) -> bool:
    """Return whether a text has no more than that."""
    return "**" not in text and re.fullmatch(r"(?:\$?\w+|\$\{\w+\}|[-+*/%()\s])*", text) is not None


def tokens_in(text: str) -> list[str]:
    """Return numbers, names and signs."""
    return re.findall(r"\$?\w+|\$\{\w+\}|[-+*/%()]", text)


def value_of(tokens: list[str]) -> int | None:
    """Return the value; None for what is no arithmetic of numbers below 2^63. Raises: ZeroDivisionError."""
    try:
        value = _sum(tokens)
    except (ValueError, IndexError, RecursionError):
        return None
    return None if tokens else value


def _sum(tokens: list[str]) -> int:
    """Take a sum from the front of the tokens, and return its value."""
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value += _product(tokens) if tokens.pop(0) == "+" else -_product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _factor(tokens)
    while tokens and tokens[0] in "*/%":
        sign, other = tokens.pop(0), _factor(tokens)
        quotient = value * other if sign == "*" else abs(value) // abs(other) * (1 if value * other >= 0 else -1)
        value = value - quotient * other if sign == "%" else quotient
        if abs(value) >= _MOST:
            raise ValueError
    return value


def _factor(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token in "+-":
        return _factor(tokens) if token == "+" else -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if tokens.pop(0) != ")":
            raise ValueError
        return value
    if len(token) > 19:
        raise ValueError
    return int(token)
