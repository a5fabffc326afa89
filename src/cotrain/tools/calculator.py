"""A tool for exact arithmetic: integers, decimals, fractions and comparisons, without rounding.

Knows + - * / // % ** and brackets, and the comparisons < <= > >= == != (chained as in 1 < 2 < 3). Sizes are bounded,
so no expression takes long. No names, no functions, no powers with a fraction in the exponent.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from cotrain.errors import ToolError

_MOST_CHARACTERS, _MOST_BITS, _MOST_PLACES = 200, 512, 30
_ALLOWED = re.compile(r"[0-9.+\-*/%()<>=! \t]*", re.ASCII)
_SIGNS = str.maketrans("×÷−", "*/-")
_THOUSANDS = re.compile(r"(?<![0-9.])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9])")

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Fraction, Fraction], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def calculator(expression: str) -> str:
    """Exact arithmetic, such as (1931 - 1920) / 2 or 1920 < 1931.

    The value as an integer, a decimal where it ends within 30 places, else a fraction "10/3"; of a comparison, "yes"
    or "no".

    Raises:
        ToolError: not an expression of the kinds named above, a division by zero, or a number that grows too large.
    """
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), expression.translate(_SIGNS).strip())
    if not text or len(text) > _MOST_CHARACTERS or not _ALLOWED.fullmatch(text):
        raise _wrong(f"{_shown(expression)} is not an expression of numbers")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _wrong(f"{_shown(expression)} is not an expression of numbers") from None
    if not isinstance(tree, ast.Compare):
        return _written(_value(tree, text))
    values = [_value(node, text) for node in (tree.left, *tree.comparators)]
    pairs = zip(tree.ops, values, values[1:], strict=False)
    return "yes" if all(_COMPARISONS[type(sign)](left, right) for sign, left, right in pairs) else "no"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):  # `...` is a constant too
            # From the text, since the tree holds decimals already rounded.
            return _bounded(Fraction(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.BinOp():
            left, right = _value(node.left, text), _value(node.right, text)
            if isinstance(node.op, ast.Pow):
                return _power(left, right)
            if type(node.op) in _OPERATIONS:
                try:
                    return _bounded(Fraction(_OPERATIONS[type(node.op)](left, right)))
                except ZeroDivisionError:
                    raise _wrong("it divides by zero") from None
    raise _wrong(f"{_shown(ast.unparse(node))} is not arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _wrong(f"the exponent {exponent} is not an integer")
    if abs(base) not in (0, 1) and abs(exponent) * (_bits(base) - 1) > _MOST_BITS:
        raise _wrong("the number grows too large")
    if base == 0 and exponent < 0:
        raise _wrong("it divides by zero")
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise _wrong("the number grows too large")
    return value


def _written(value: Fraction) -> str:
    places = next((n for n in range(_MOST_PLACES + 1) if 10**n % value.denominator == 0), None)
    if not places:  # an integer, or a decimal without end: both are as Fraction writes them
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _wrong(found: str) -> ToolError:
    return ToolError("calculator", found, "Write numbers, + - * / // % **, brackets, or a comparison")
