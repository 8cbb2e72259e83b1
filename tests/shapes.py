"""Shapes in signatures are checked by jaxtyping and beartype, put in as the package is imported."""

from __future__ import annotations

import ast

import jaxtyping
from jaxtyping import _import_hook

CHECKER = "beartype.beartype(conf=beartype.BeartypeConf())"  # written out, so that compiled files are not shared with jaxtyping's own hook

ARRAYS = {name for name, value in vars(jaxtyping).items() if isinstance(value, type) and issubclass(value, jaxtyping.AbstractDtype)}


class Outermost(_import_hook.JaxtypingTransformer):
    """Checks what has an array in its signature: functions of modules, methods of classes, and the fields of dataclasses.

    jaxtyping's own hook takes every function, and also those made within functions, which are then compiled again at every
    call of the outer one: whole runs took twice as long.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        signature = ast.Module([ast.Expr(part) for part in (*(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg)), node.returns) if part], [])
        return super().visit_FunctionDef(node) if any(isinstance(n, ast.Name) and n.id in ARRAYS for n in ast.walk(signature)) else node

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.FunctionDef):  # what is made within it is left alone
            super().generic_visit(node)


def check_shapes(package: str) -> None:
    """Check every call within a package that is not imported yet."""
    _import_hook.JaxtypingTransformer = Outermost
    jaxtyping.install_import_hook(package, CHECKER)
