"""Files and functions of the package stay short, and functions take few parameters."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "chunkgraph").rglob("*.py"))


def oversized(source: str) -> Iterator[str]:
    """Yield what is too long in a file, and who takes many parameters without a reason."""
    if (num_lines := source.count("\n")) > 900:
        yield f"{num_lines} lines"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[0].lineno
        if (num_lines := (node.end_lineno or 0) - node.lineno + 1) > 100:
            yield f"{node.name}: {num_lines} lines"
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        num_parameters = len([name for name in names if name not in ("self", "cls")])
        if num_parameters > 8 and comments.isdisjoint(range(node.lineno, body)):
            yield f"{node.name}: {num_parameters} parameters, and no comment says why"


def test_no_file_or_function_is_oversized() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in FILES
        for what in oversized(path.read_text(encoding="utf-8"))
    ]
    assert not found
