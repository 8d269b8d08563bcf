"""Finds in source text where the fields of the scheduler's state are written.

It does not run anything: what hides a write behind a call or an attribute it does not know escapes.
"""

import ast

# module -> its classes, whose fields nobody else writes
OWNED = {
    "tcb.planning.state": ("State", "Sequence"),
    "tcb.planning.blocks": ("BlockPool",),
    "tcb.planning.draft": ("Draft",),
}
MUTATORS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end"),
        *("pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
    )
)


def owned_fields(sources):
    """Names of the fields of the classes that only their own module writes."""
    names = set()
    for module, classes in OWNED.items():
        for node in ast.parse(sources[module]).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                names |= _annotated(node.body) | _set_on_self(node)
    return names


def _annotated(body):
    return {n.target.id for n in body if isinstance(n, ast.AnnAssign)}


def _set_on_self(node):
    return {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _is_self(n.value)
    }


def _is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def pool_writers(sources):
    """Methods of the pool that change it."""
    tree = ast.parse(sources["tcb.planning.blocks"])
    [pool] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "BlockPool"]
    methods = {n.name: n for n in pool.body if isinstance(n, ast.FunctionDef)}
    found = {n for n, method in methods.items() if n != "__init__" and _changes_self(method, ())}
    grown = True
    while grown:
        more = {n for n, m in methods.items() if n != "__init__" and _changes_self(m, found)}
        grown = more != found
        found = more
    return found


def _changes_self(method, changing):
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on_self = _is_self(node.func.value)
            if node.func.attr in (changing if on_self else MUTATORS):
                return True
    return False


class Writes(ast.NodeVisitor):
    """Collects where a module changes a field of another object, or a container held by one.

    A write is an assignment to, or a deletion of, `x.field` or `x.field[...]`, a call of a mutating
    method on these, or one of the pool's changing methods on anything called `pool`. A local name
    bound to such a field, or to an element of one, counts as the field. A name whose class is
    plain, because it is `self`, annotated, or bound to a new object, counts only if that class is
    owned; everything else counts, whatever it may be.
    """

    def __init__(self, fields, methods):
        self.fields, self.methods = fields, methods
        self.found, self.aliases, self.class_of, self.renamed = [], set(), {}, {}

    def visit_ImportFrom(self, node):
        self.renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}

    def visit_ClassDef(self, node):
        self._visit_inner(node, {"self": node.name, "cls": node.name})

    def visit_FunctionDef(self, node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._visit_inner(
            node,
            {a.arg: _class_name(a.annotation) for a in arguments if a.arg not in ("self", "cls")},
        )

    def _visit_inner(self, node, class_of):
        outer = self.aliases, self.class_of
        self.aliases, self.class_of = set(self.aliases), self.class_of | class_of
        self.generic_visit(node)
        self.aliases, self.class_of = outer

    def visit_Assign(self, node):
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)
            self.visit(target)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node):
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node):
        self._bind_elements(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehension(self, node):
        for generator in node.generators:
            self._bind_elements(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Attribute(self, node):
        if not isinstance(node.ctx, ast.Load) and self._is_field(node):
            self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def visit_Subscript(self, node):
        if not isinstance(node.ctx, ast.Load) and self._is_field(node.value):
            self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute):
            owner, method = node.func.value, node.func.attr
            mutates = method in MUTATORS and self._is_field(owner)
            if mutates or (method in self.methods and _is_pool(owner)):
                self.found.append((node.lineno, ast.unparse(node.func)))
        self.generic_visit(node)

    def _is_field(self, node):
        """Whether this is an owned field of some object, an element of one, or an alias."""
        if isinstance(node, ast.Subscript | ast.NamedExpr):
            return self._is_field(node.value)
        if isinstance(node, ast.Name):
            return node.id in self.aliases
        if not isinstance(node, ast.Attribute) or node.attr not in self.fields:
            return False
        class_name = self.class_of.get(getattr(node.value, "id", None))
        class_name = self.renamed.get(class_name, class_name)
        return class_name is None or any(class_name in names for names in OWNED.values())

    def _bind(self, target, value):
        """Follow `target = value`."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts, strict=True):
                self._bind(one, its_value)
        elif isinstance(target, ast.Name):
            (self.aliases.add if self._is_field(value) else self.aliases.discard)(target.id)
            self.class_of[target.id] = self._class_made_by(value)

    def _bind_elements(self, target, source):
        """Follow `for target in source`, through enumerate, zip, values and the like."""
        is_field = any(self._is_field(node) for node in ast.walk(source))
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                (self.aliases.add if is_field else self.aliases.discard)(node.id)
                self.class_of.pop(node.id, None)

    def _class_made_by(self, value):
        """The class that is called here to make an object; None if that is not plain."""
        if not isinstance(value, ast.Call):
            return None
        made = value.func
        if isinstance(made, ast.Attribute) and made.attr == "__new__":
            made = made.value
        name = getattr(made, "id", "")
        return self.class_of.get("cls") if name == "cls" else _class_name(made)


def writes(source, fields, methods):
    """Line and text of every write to one of the fields in this source."""
    visitor = Writes(fields, methods)
    visitor.visit(ast.parse(source))
    return visitor.found


def _class_name(node):
    """The name in an annotation or call if it is that of a class; None for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    name = getattr(node, "id", "")
    return name if name[:1].isupper() and name not in ("Any", "Sequence", "T") else None


def _is_pool(node):
    return "pool" in (getattr(node, "id", None), getattr(node, "attr", None))
