"""Counts the lines of code of a source, and finds functions whose annotations are not complete."""

import ast
import io
import tokenize

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def count_code_lines(source: str) -> int:
    """Lines of a formatted source without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def unannotated(source: str) -> list[tuple[int, str]]:
    """Line and name of each function that leaves a parameter or its result without a type.

    Kernels are exempt (`triton.jit`): their parameters are pointers and scalars of Triton's
    language. So are `self` and `cls`, and the result of `__init__`.
    """
    tree = ast.parse(source)
    methods = {
        id(function)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for function in node.body
    }
    return [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, _Function)
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and not _is_complete(node, id(node) in methods)
    ]


def _is_complete(function: _Function, is_method: bool) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
    if is_method and not static:
        named = named[1:]
    rest = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    has_result = function.returns is not None or function.name == "__init__"
    return has_result and all(a.annotation for a in [*named, *arguments.kwonlyargs, *rest])
