"""Follows the values of a request through the syntax tree of a handler; the code does not run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ingot.errors import InvalidArgument
from ingot.importing.recognition import calls
from ingot.importing.recognition.form import NOTHING, UNKNOWN, Form, Stage, Value, furthest
from ingot.importing.recognition.syntax import CLASSIFIER, PASSING, SKIPPED, VISION, Scope, base_of, functions_of, shown
from ingot.runtime.engines.python.torchserve.ts.transforms import RESIZED, SIZE
from ingot.steps.images.presets import classifier

# Calls within calls: a function that calls itself has no end.
_DEEPEST = 12
_MOST_NAMED = 8
_KNOWN = (
    "Steps can have a picture by Pillow and torchvision's transforms, or a text by a tokenizer, the model, softmax or "
    "sigmoid, topk, and map_class_to_label; import the handler as it is, without --without-code"
)


def recognized(code: str, file: str, function: str) -> tuple[Form, tuple[str, ...]]:
    """Return the form of a handler, and a line on each part of its code that was found.

    Args:
        code: of the handler's file.
        file: its name, for messages.
        function: the module's function that answers, if it has one of that name.

    Raises:
        InvalidArgument: the code has another form; the message names the lines that are not known.
    """
    try:
        reader = _Reader(ast.parse(code))
        answer = reader.answer(function)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"{file} cannot be read as Python: {error}") from error
    if reader.unknown or answer.stage is not Stage.ANSWER:
        known = [f"line {line}: {text}" for line, text in sorted(reader.unknown.items())[:_MOST_NAMED]]
        why = "; ".join(known) or "its answer has no names with scores (map_class_to_label)"
        raise InvalidArgument(f"the handler {file} does not become steps: {why}. {_KNOWN}")
    left = {line: f"left out: {text}" for line, text in reader.left.items()}
    lines = sorted((reader.found | left).items())
    return answer.form, tuple(f"{file}, line {line}: {text}" for line, text in lines)


class _Reader:
    """The code of one module.

    Attributes:
        found: what was recognized, by line.
        unknown: code that is not known and that values of a request reach, by line.
        left: the same of branches that are not followed.
    """

    def __init__(self, module: ast.Module):
        self.found: dict[int, str] = {}
        self.unknown: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self._functions = functions_of(module.body)
        classes = [each for each in module.body if isinstance(each, ast.ClassDef)]
        handler = next((each for each in classes if base_of(each) or "handle" in functions_of(each.body)), None)
        self._name, self._base = (handler.name, base_of(handler)) if handler else ("", "")
        self._line = handler.lineno if handler else 1
        self._methods = functions_of(handler.body) if handler else {}
        self._attributes = {"model": Value(Stage.MODEL), "mapping": Value(Stage.NAMES)} if self._base else {}
        if self._base == CLASSIFIER:
            transforms = Value(Stage.TRANSFORMS, form=Form(operations=classifier(SIZE, resize=RESIZED)))
            self._attributes |= {"image_processing": transforms, "topk": Value(Stage.CONSTANT, 5)}
        self._depth = 0
        self._module = Scope()
        self._run(module.body, self._module)
        own = Scope()
        self._run(handler.body if handler else [], own)
        self._attributes |= own.values
        for name in ("__init__", "initialize"):
            self._method(name, [])

    def answer(self, function: str) -> Value:
        """Return the value that a batch of rows becomes."""
        rows = [Value(Stage.ROWS), UNKNOWN]
        if (entry := self._functions.get(function)) is not None:
            return self._inside(entry, rows)
        try:
            return self._method("handle", rows)
        except calls.NotKnown:  # what a method of TorchServe's class does not accept
            self.unknown.setdefault(
                self._line, f"class {self._name}: its methods do not pass on what the next one reads"
            )
            return UNKNOWN

    def _method(self, name: str, given: Sequence[Value], *, own: bool = True) -> Value:
        """Return the result of a method of the handler, or of that of TorchServe's class that it derives from."""
        if own and (method := self._methods.get(name)) is not None:
            static = any(ast.unparse(each) == "staticmethod" for each in method.decorator_list)
            return self._inside(method, given if static else [Value(Stage.HANDLER), *given])
        first = furthest(given)
        if name == "handle" and self._base:
            return self._method("postprocess", [self._method("inference", [self._method("preprocess", [first])])])
        if name == "inference" and first.followed:
            return calls.apply(Value(Stage.MODEL), [first], NOTHING)
        if name == "preprocess" and self._base in (VISION, CLASSIFIER):
            picture = replace(first, stage=Stage.PICTURE)
            return calls.apply(self._attributes.get("image_processing", UNKNOWN), [picture], NOTHING)
        if name == "postprocess" and self._base == CLASSIFIER:
            scores = calls.call("softmax", [first], NOTHING)
            best = calls.call("topk", [scores, self._attributes["topk"]], NOTHING)
            return calls.call("map_class_to_label", best.content, NOTHING)
        if first.followed and name != "postprocess":
            raise calls.NotKnown
        return first

    def _inside(self, function: ast.FunctionDef, given: Sequence[Value]) -> Value:
        if self._depth >= _DEEPEST:
            return UNKNOWN
        for each in function.decorator_list:
            if ast.unparse(each).removesuffix("()").rpartition(".")[2] not in PASSING:
                self._reported(each, UNKNOWN, "a decorator")
        named = [each.arg for each in function.args.args]
        scope = Scope(dict(zip(named, given, strict=False)))
        self._depth += 1
        self._run(function.body, scope)
        self._depth -= 1
        result = scope.returned
        if result.stage > Stage.RAW:  # an answer before it is for other requests
            others = [node for node, value in scope.returns if (value.stage, value.form) != (result.stage, result.form)]
            self.left |= {node.lineno: shown(node) for node in others if shown(node) not in ("return", "return None")}
        return result

    def _run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for each in body:
            self._statement(each, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self._value(value, scope)
                for target in targets:
                    self._assign(target, found, scope)
            case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
                if value is not None:
                    self._assign(target, self._value(value, scope), scope)
            case ast.Return(value=value):
                found = self._value(value, scope) if value is not None else UNKNOWN
                scope.returned = furthest([scope.returned, found])
                scope.returns.append((node, found))
            case ast.Expr(value=value):
                self._value(value, scope)
            case ast.For(target=target, iter=iterated, body=body):
                self._assign(target, self._value(iterated, scope), scope)
                self._run(body, scope)
            case ast.With(items=items, body=body):
                for item in items:
                    found = self._value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, found, scope)
                self._run(body, scope)
            case ast.Try(body=body, orelse=others, finalbody=last):
                self._run([*body, *others, *last], scope)
            case ast.If():
                self._branches(node, scope)
            case _ if not isinstance(node, SKIPPED):
                self.unknown[node.lineno] = shown(node)

    def _branches(self, node: ast.If, scope: Scope) -> None:
        """Follow the branch whose values come further, or else the first; the other one is left out, with a note."""
        before, known = dict(scope.values), dict(self.unknown)
        ends = []
        for body in (node.body, node.orelse):
            scope.values, self.unknown = dict(before), {}
            self._run(body, scope)
            ends.append((scope.values, self.unknown))
        (first, faults), (second, others) = ends
        names = first.keys() | second.keys()
        leads = [first.get(name, UNKNOWN).stage - second.get(name, UNKNOWN).stage for name in names]
        lead = max(leads, key=abs, default=0)
        scope.values = {name: furthest(each[name] for each in (first, second) if name in each) for name in names}
        kept, left = (faults, others) if lead > 0 else (others, faults)
        self.unknown = known | (faults | others if lead == 0 else kept)
        self.left |= left if lead else {}
        if any(first[name].form != second[name].form for name in first.keys() & second.keys()) and not lead:
            other = node.orelse[0] if node.orelse else node
            self.left[other.lineno] = shown(other) if node.orelse else f"the case that not {shown(node.test)}"

    def _assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.values[name] = value
            case ast.Attribute(attr=name):
                # TorchServe's own loading, and torch.load, which may load anything, fill these two.
                if name not in ("model", "mapping") or value.stage in (Stage.MODEL, Stage.NAMES):
                    self._attributes[name] = value
                if name in ("model", "mapping") and name not in self._attributes:
                    self._attributes[name] = Value(Stage.MODEL if name == "model" else Stage.NAMES)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value.content if isinstance(value.content, tuple) else ()
                for index, each in enumerate(targets):
                    self._assign(each, parts[index] if len(parts) == len(targets) else value, scope)

    def _value(self, node: ast.expr, scope: Scope) -> Value:
        def value(each: ast.expr) -> Value:
            return self._value(each, scope)

        match node:
            case ast.Constant(value=content):
                return Value(Stage.CONSTANT, content)
            case ast.Name(id=name):
                known = scope.values.get(name, self._module.values.get(name))
                return known if known is not None else Value(content=name)
            case ast.Attribute():
                return self._attribute(node, value)
            case ast.List(elts=parts):
                return self._several([*map(value, parts)], list)
            case ast.Tuple(elts=parts):
                return self._several([*map(value, parts)], tuple)
            case ast.Dict(values=parts):
                found = furthest(map(value, parts))
                return self._reported(node, found) if found.stage > Stage.PIXELS else found
            case ast.Subscript(value=inner, slice=index):
                return self._element(node, value(inner), value(index))
            case ast.Call():
                return self._call(node, scope)
            case ast.ListComp(elt=result, generators=loops) | ast.GeneratorExp(elt=result, generators=loops):
                inner_scope = Scope(dict(scope.values))
                for loop in loops:
                    self._assign(loop.target, self._value(loop.iter, inner_scope), inner_scope)
                return self._value(result, inner_scope)
            case ast.BoolOp(values=parts):
                return furthest(map(value, parts))
            case ast.IfExp(body=first, orelse=second):
                return furthest([value(first), value(second)])
            case ast.Starred(value=inner):
                return value(inner)
            case ast.BinOp(left=first, right=second):
                found = furthest([value(first), value(second)])
                return self._reported(node, found) if found.stage > Stage.RAW else UNKNOWN
            case _:
                return UNKNOWN

    def _several(self, found: Sequence[Value], kind: Callable[[Sequence[Value]], Any]) -> Value:
        if all(each.stage is Stage.CONSTANT for each in found):
            return Value(Stage.CONSTANT, kind([each.content for each in found]))
        return replace(furthest(found), content=kind(found))

    def _attribute(self, node: ast.Attribute, value: Callable[[ast.expr], Value]) -> Value:
        owner, name = value(node.value), node.attr
        if owner.stage is Stage.HANDLER:
            return self._attributes.get(name, UNKNOWN)
        if owner.stage is Stage.TOKENS:
            return replace(owner, content=name)
        if owner.stage is Stage.LOGITS and name == "logits":
            return owner
        if name in ("values", "indices") and isinstance(owner.content, tuple):
            scores, classes = owner.content
            return cast("Value", classes if name == "indices" else scores)
        return UNKNOWN if owner.followed else Value(content=f"{owner.content}.{name}")

    def _element(self, node: ast.expr, owner: Value, index: Value) -> Value:
        if owner.stage is Stage.ROWS and isinstance(index.content, str):
            return self._part(owner, index.content)
        if owner.stage is Stage.TOKENS and isinstance(index.content, str):
            return replace(owner, content=index.content)
        if isinstance(owner.content, tuple | list) and isinstance(at := index.content, int) and owner.followed:
            return cast("Value", owner.content[at]) if -len(owner.content) <= at < len(owner.content) else UNKNOWN
        if owner.stage is Stage.RAW:
            return self._reported(node, owner)
        return owner if owner.followed else UNKNOWN

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        given = [self._value(each, scope) for each in node.args]
        keywords = {each.arg or "**": self._value(each.value, scope) for each in node.keywords}
        try:
            found = self._called(node.func, scope, given, keywords)
        except calls.NotKnown as error:
            return self._reported(node, furthest(given), str(error))
        last = ast.unparse(node.func).rpartition(".")[2]
        if last in calls.NOTED or (found.stage is Stage.TOKENS and furthest(given).stage < Stage.TOKENS):
            self.found[node.lineno] = shown(node)
        return found

    def _called(self, function: ast.expr, scope: Scope, given: Sequence[Value], keywords: calls.Keywords) -> Value:
        """Return the result of a call.

        Raises:
            NotKnown: it is not known what the call makes of a value of a request.
        """
        callee = self._value(function, scope)
        if isinstance(function, ast.Attribute):
            return self._method_called(function, callee, scope, given, keywords)
        name = function.id if isinstance(function, ast.Name) else ""
        if (own := self._functions.get(name)) is not None:
            return self._inside(own, given)
        if name and name == self._name:
            return Value(Stage.HANDLER)
        if name == "zip":
            return replace(furthest(given), content=tuple(given))
        return self._applied(name, callee, given, keywords)

    def _method_called(
        self, function: ast.Attribute, callee: Value, scope: Scope, given: Sequence[Value], keywords: calls.Keywords
    ) -> Value:
        name, owner = function.attr, self._value(function.value, scope)
        if ast.unparse(function.value).startswith("super("):
            return self._method(name, given, own=False)
        if owner.stage is Stage.HANDLER and callee.stage is Stage.UNKNOWN:
            return self._method(name, given)
        if name == "append" and isinstance(function.value, ast.Name):  # a list stands for its elements
            scope.values[function.value.id] = furthest([*given, owner])
            return UNKNOWN
        if owner.stage is Stage.ROWS and name == "get":
            return self._part(owner, str(given[0].content) if given else "")
        if owner.stage in (Stage.MODEL, Stage.TOKENIZER):
            return owner if name in calls.SAME else calls.apply(owner, given, keywords)
        if name == "load" and str(owner.content).startswith("torch"):
            return Value(Stage.MODEL)
        more = [owner] if owner.followed or name == "from_pretrained" else []
        return self._applied(name, callee, [*more, *given], keywords)

    def _applied(self, name: str, callee: Value, given: Sequence[Value], keywords: calls.Keywords) -> Value:
        if callee.stage in (Stage.TRANSFORMS, Stage.TOKENIZER, Stage.MODEL):
            return calls.apply(callee, given, keywords)
        return calls.call(name, given, keywords)

    def _part(self, rows: Value, name: str) -> Value:
        """Return a value of a row; a name other than TorchServe's own is that of the input."""
        part = "" if name in ("data", "body") else name
        return Value(Stage.RAW, form=replace(rows.form, part=part))

    def _reported(self, node: ast.AST, value: Value, why: str = "") -> Value:
        """Note that code is not known; its result is not followed."""
        self.unknown.setdefault(getattr(node, "lineno", 0), f"{shown(node)}{f' ({why})' if why else ''}")
        return UNKNOWN
