"""Branches on the values of tensors, rewritten as ``torch.cond``."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence

from ingot.export.explain.code import Edit, Site, covers, defined_before, expressions, stored
from ingot.export.explain.conversions import as_tensor, numbers_of

_ADVICE = (
    "use torch.where or torch.cond, whose branches must return tensors of equal shape and type and change nothing else"
)
_STEPS = (
    "run a fixed number of steps and keep finished results by torch.where, or export with --capture script, which "
    "keeps loops (over numbers as range(int(n)))"
)
_FRESH = (ast.BinOp, ast.UnaryOp, ast.Compare)
_VIEWS = re.compile(
    "chunk|contiguous|detach|diagonal|expand|expand_as|flatten|float|double|half|long|int|bool|narrow|permute|reshape|"
    "select|split|squeeze|swapaxes|t|to|transpose|type|unbind|unflatten|unfold|unsqueeze|view|view_as"
)


def decide(site: Site, line: int) -> Edit | None:
    """Return the edit for a statement that branches or loops by the values of a tensor on ``line``, or None."""
    statement = site.statement
    if isinstance(statement, ast.While) or (isinstance(statement, ast.For) and _counts(statement.iter)):
        return Edit(_STEPS, site.text(statement, statement))
    if isinstance(statement, ast.Assert) or _raises(statement):
        return Edit("remove the check, or do it before the model runs", site.text(statement, statement))
    if isinstance(statement, ast.If) and covers(statement.test, line):
        return _branch(site, statement)
    for node in expressions(statement):
        if isinstance(node, ast.IfExp) and covers(node.test, line):
            numbers = numbers_of(site, [node])
            branches = [_lambda(part, ", ".join(numbers)) for part in (node.body, node.orelse)]
            return site.splice(_ADVICE, [(node, _cond(node.test, branches, numbers, numbers))])
    return None


def _counts(iterable: ast.expr) -> bool:
    return isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.func.id == "range"


def _raises(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise) and not statement.orelse


def _branch(site: Site, statement: ast.If) -> Edit:
    fallback = Edit(_ADVICE, site.text(statement, statement))
    then, otherwise = statement.body, statement.orelse
    last: ast.stmt = statement
    if _returns(then) and not _returns(otherwise) and site.following:
        otherwise, last = [*otherwise, *site.following], site.following[-1]
    if not _pure([*then, *otherwise]):
        return fallback
    numbers = numbers_of(site, [statement.test, *then, *otherwise])
    if _returns(then) and _returns(otherwise):
        outputs: list[str] = []
    elif any(isinstance(node, ast.Return) for part in (*then, *otherwise) for node in ast.walk(part)):
        return fallback
    else:
        outputs = [name for name in stored([*then, *otherwise]) if _is_used(site, name, last)]
        known = defined_before(site)
        if not outputs or any(name not in known for name in outputs if not _in_both(name, then, otherwise)):
            return fallback
        then, otherwise = ([*part, _result(outputs)] for part in (then, otherwise))
    return _written(site, statement, (then, otherwise), outputs, numbers, last)


def _written(
    site: Site,
    statement: ast.If,
    branches: tuple[list[ast.stmt], list[ast.stmt]],
    outputs: Sequence[str],
    numbers: Mapping[str, str],
    last: ast.stmt,
) -> Edit:
    bodies = [_shortened([_Returns(stored(body)).visit(copy.deepcopy(part)) for part in body]) for body in branches]
    # A name assigned in a function is local to it, so its earlier value must be passed as an argument.
    assigned = {name for body in bodies if len(body) > 1 for name in stored(body)}
    known = defined_before(site)
    operands = {name: name for name in stored([*branches[0], *branches[1]]) if name in assigned and name in known}
    operands |= numbers
    parameters = ", ".join(operands)
    code: list[str] = []
    references = []
    for name, body in zip(("if_true", "if_false"), bodies, strict=True):
        if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
            references.append(_lambda(body[0].value, parameters))
            continue
        code += [f"def {name}({parameters}):"]
        code += ["    " + line for part in body for line in ast.unparse(part).split("\n")]
        references.append(name)
    target = f"{', '.join(outputs)} =" if outputs else "return"
    code.append(f"{target} {_cond(statement.test, references, numbers, operands)}")
    return site.replace(_ADVICE, code, last)


def _cond(test: ast.expr, branches: Sequence[str], numbers: Mapping[str, str], operands: Mapping[str, str]) -> str:
    """Return the call; numbers are passed as tensors, and branches read other names from the enclosing scope."""
    condition = ast.unparse(_as_condition(as_tensor(test, numbers)))
    values = f", ({', '.join(operands.values())},)" if operands else ""
    return f"torch.cond({condition}, {', '.join(branches)}{values})"


def _returns(body: Sequence[ast.stmt]) -> bool:
    """Return whether a body always returns."""
    if not body:
        return False
    last = body[-1]
    return (isinstance(last, ast.Return) and last.value is not None) or (
        isinstance(last, ast.If) and _returns(last.body) and _returns(last.orelse)
    )


def _pure(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements only compute and assign names, as a branch of a graph must."""
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                return False
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
                return False
            if isinstance(node, ast.Raise | ast.Break | ast.Continue | ast.Yield | ast.Await):
                return False
    return True


def _is_used(site: Site, name: str, last: ast.stmt) -> bool:
    scope = ast.walk(site.function) if site.function else iter(())
    loops = [node for node in scope if isinstance(node, ast.For | ast.While) and covers(node, site.statement.lineno)]
    end = last.end_lineno or last.lineno
    nodes = ast.walk(site.function) if site.function else iter(())
    return any(
        isinstance(node, ast.Name)
        and node.id == name
        and isinstance(node.ctx, ast.Load)
        and (node.lineno > end or bool(loops))
        for node in nodes
    )


def _in_both(name: str, then: Sequence[ast.stmt], otherwise: Sequence[ast.stmt]) -> bool:
    return name in stored(then) and name in stored(otherwise)


def _result(names: Sequence[str]) -> ast.Return:
    expression = ast.parse(", ".join(names), mode="eval").body
    return ast.Return(expression)


def _shortened(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return ``y = value; return y.clone()`` as ``return value``."""
    if len(body) != 2 or not isinstance(body[0], ast.Assign) or not isinstance(body[1], ast.Return):
        return body
    (target, *others), value = body[0].targets, body[1].value
    if others or not isinstance(target, ast.Name) or not isinstance(value, ast.Name) or value.id != target.id:
        return body
    return [ast.Return(_fresh(body[0].value))]


class _Returns(ast.NodeTransformer):
    """Replaces returned views by copies and in-place additions by new values, as ``torch.cond`` requires."""

    def __init__(self, own: Sequence[str]):
        self._own = own

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(_fresh(node.value, self._own)) if node.value is not None else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)


def _fresh(value: ast.expr, own: Sequence[str] = ()) -> ast.expr:
    if isinstance(value, ast.Tuple | ast.List):
        return type(value)([_fresh(item, own) for item in value.elts], ast.Load())
    if isinstance(value, ast.Dict):
        return ast.Dict(value.keys, [_fresh(item, own) for item in value.values])
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else ""
    if isinstance(value, _FRESH) or (function is not None and not _VIEWS.fullmatch(name)):
        return value
    if isinstance(value, ast.Name) and value.id in own:
        return value
    return ast.Call(ast.Attribute(value, "clone", ast.Load()), [], [])


def _lambda(value: ast.expr, parameters: str = "") -> str:
    return f"lambda {parameters}: {ast.unparse(_fresh(value))}".replace("lambda :", "lambda:")


def _as_condition(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.BoolOp):
        operator = ast.BitAnd() if isinstance(test.op, ast.And) else ast.BitOr()
        joined, *rest = (_as_condition(value) for value in test.values)
        for part in rest:
            joined = ast.BinOp(joined, operator, part)
        return joined
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.Call(_name("torch.logical_not"), [_as_condition(test.operand)], [])
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        parts = [test.left, *test.comparators]
        pairs = zip(parts, test.ops, parts[1:], strict=False)
        return _as_condition(ast.BoolOp(ast.And(), [ast.Compare(left, [op], [right]) for left, op, right in pairs]))
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        if test.func.attr in ("any", "all"):
            return test
        if test.func.attr in ("equal", "allclose"):
            test.func.attr = {"equal": "eq", "allclose": "isclose"}[test.func.attr]
            return ast.Call(ast.Attribute(test, "all", ast.Load()), [], [])
    if isinstance(test, ast.Compare):
        return test
    return ast.Compare(test, [ast.NotEq()], [ast.Constant(0)])


def _name(path: str) -> ast.expr:
    return ast.parse(path, mode="eval").body
