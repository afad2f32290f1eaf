"""Which names a notebook cell reads: an analysis of its source, in order of execution."""

import ast
import builtins
import dis
from collections.abc import Iterable
from types import CodeType


def needed(tree: ast.Module) -> set[str]:
    """Names that running a module may read before it certainly assigned them."""
    reader = _Reader()
    reader.block(tree.body)
    return reader.needed - set(dir(builtins))


class _Reader(ast.NodeVisitor):
    """Visits statements in order of execution and notes reads of names not yet assigned for certain."""

    def __init__(self) -> None:
        self.needed: set[str] = set()
        self.have: set[str] = set()

    def block(self, body: Iterable[ast.AST]) -> None:
        for node in body:
            self.visit(node)

    def maybe(self, *bodies: Iterable[ast.AST]) -> None:
        """Blocks that may not run, or not to their end: what they assign is not certain afterwards."""
        for body in bodies:
            before = set(self.have)
            self.block(body)
            self.have = before

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.have.add(node.id)
        elif node.id not in self.have:
            self.needed.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        self.block(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        for name in ast.walk(node.target):
            if isinstance(name, ast.Name) and name.id not in self.have:
                self.needed.add(name.id)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.maybe(node.body, node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        before = set(self.have)
        self.visit(node.target)
        self.block(node.body)
        self.have = before
        self.maybe(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.maybe(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self.maybe(node.body, *[[handler] for handler in node.handlers], node.orelse)
        self.block(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.maybe(*[[case] for case in node.cases])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar | ast.ExceptHandler) -> None:
        self.have |= {node.name} if node.name else set()
        self.generic_visit(node)

    visit_MatchStar = visit_ExceptHandler = visit_MatchAs

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.have |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.block([*node.decorator_list, *node.bases, *node.keywords])
        self.maybe(node.body)
        self.have.add(node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.block([*node.decorator_list, node.args, *([node.returns] if node.returns else [])])
        self.have.add(node.name)
        self._inside(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._inside(node)

    def _inside(self, node: ast.AST) -> None:
        """Globals a function reads, by Python's own analysis of its scopes."""
        body = [node] if isinstance(node, ast.stmt) else [ast.Expr(node)]  # type: ignore[arg-type]
        module = ast.fix_missing_locations(ast.Module(body, []))  # type: ignore[arg-type]
        code = compile(module, "<cell>", "exec")
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.needed |= {name for name in globals_of(inner) if name not in self.have}

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        before = set(self.have)
        self.block(node.generators)
        self.block([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self.have = before

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self.visit(node.target)
        self.block(node.ifs)


def globals_of(code: CodeType) -> set[str]:
    """Global names that a function reads, its inner functions included."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= globals_of(inner)
    return found
