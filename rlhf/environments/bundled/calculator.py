"""A calculator as a tool, for arithmetic problems."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_LONGEST = 200
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Computes with numbers, +, -, *, / and parentheses; only the written result is rounded."""

    def reset(self, **row: object) -> None:
        return None

    def calc(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: Numbers with +, -, *, / and parentheses.
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression has at most {_LONGEST} characters")
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body)
            return str(value if value.denominator == 1 else float(value))
        except SyntaxError as error:
            raise ValueError("not an expression") from error
        except (ZeroDivisionError, OverflowError) as error:
            raise ValueError("the result is too large, or a division by 0") from error


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, +, -, *, / and parentheses")
