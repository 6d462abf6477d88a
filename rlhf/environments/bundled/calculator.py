"""A calculator as a tool, for arithmetic problems."""

import ast
import operator
from collections.abc import Callable

_LONGEST = 200
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class Calculator:
    """Computes with whole numbers, +, -, * and parentheses."""

    def reset(self, **row: object) -> None:
        return None

    def calc(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: Whole numbers with +, -, * and parentheses.
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression has at most {_LONGEST} characters")
        try:
            return str(_value(ast.parse(expression.strip(), mode="eval").body))
        except SyntaxError as error:
            raise ValueError("not an expression") from error


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, -, * and parentheses")
