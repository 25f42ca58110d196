"""Discover plugs: a file in a folder is the plug, its stem is its name, and it holds one upper-case value.

Names are listed without importing anything, so that listing stays quick and a broken plug does not affect the others.
"""

import ast
import hashlib
import importlib
import importlib.util
import re
import symtable
import sys
from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.units import meant

if TYPE_CHECKING:  # it takes as long to import as the rest of --help
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "attnbench.implementations"
IMPLEMENTATIONS = "implementations"
"""The folder that holds them, in this project and in those that are compared."""
PACKAGE = f"attnbench.{IMPLEMENTATIONS}"
OPTIONS = ("compile",)
"""What may follow a name after a plus: the same implementation run in another way (contract/loading.py)."""
KEYWORDS = (
    "mask",
    "is_causal",
    "is_causal_bottom_right",
    "key_padding_mask",
    "bias",
    "scale",
    "sinks",
    "softcap",
    "window_size",
    "num_kv_heads",
    "dropout",
)
"""The arguments that a plain function may be passed by name, after query, key and value (contract/functions.py)."""
ALIASES = {
    "attn_mask": "mask",
    "attention_mask": "mask",
    "causal": "is_causal",
    "attn_bias": "bias",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "s_aux": "sinks",
    "sink": "sinks",
    "learnable_sink": "sinks",
    "enable_gqa": "num_kv_heads",
    "dropout_p": "dropout",
}
"""Other packages' names for KEYWORDS."""
DISTRIBUTING = ("all_gather", "context_parallel", "ring", "ulysses", "zigzag_ring")
"""Implementations in the folder that compute with several ranks: with one rank they take part only if named."""
SDPA = "scaled_dot_product_attention"
LONGEST_NAME = 100
_LABELLED = re.compile(r"([^=/]+)=(.+)")
"""`LABEL=SPEC`: takes part under another name than its own."""


def stems(package: str) -> list[str]:
    """The names of the modules in a package, sorted, none of them imported.

    Raises:
        ValueError: the package cannot be found.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"the package {package} cannot be found; is attnbench installed?")
    return sorted(file.stem for folder in spec.submodule_search_locations for file in Path(folder).glob("[a-z]*.py"))


def plugs(package: str, constant: str) -> dict[str, Any]:
    """The value `constant` of every module of `package` that has one, by the module's stem.

    A dict stands for several, each by its own name. The modules that the package names in HELPERS are not imported.
    """
    helpers = getattr(importlib.import_module(package), "HELPERS", ())
    found: dict[str, Any] = {}
    for name in sorted({*stems(package)} - {*helpers}):
        value = getattr(importlib.import_module(f"{package}.{name}"), constant, None)
        found |= value if isinstance(value, dict) else {} if value is None else {name: value}
    return dict(sorted(found.items()))


def installed() -> "dict[str, EntryPoint]":
    """Implementations that other installed packages offer, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def implementation_names() -> list[str]:
    """Every implementation that can be named: those in the folder, then those of installed packages."""
    own = stems(PACKAGE)
    return own + sorted(set(installed()) - set(own))


def name_of(spec: str) -> str:
    """The name under which a spec takes part: its label, the name, or the stem for IMPLEMENTATION.

    An option is part of the name.
    """
    if (label := _LABELLED.fullmatch(spec)) is not None:
        return label[1]
    base, option = variant(spec)
    path, attribute = split(base)
    name = path.stem if path is not None and attribute == "IMPLEMENTATION" else attribute
    return f"{name}+{option}" if option else name


def variant(spec: str) -> tuple[str, str]:
    """`name+option` or `path/to/file.py:Name+option` as (what stands before the plus, option); else (spec, "")."""
    match = re.fullmatch(r"(.*\w)\+(\w+)", spec)
    return (match[1], match[2]) if match else (spec, "")


def split(spec: str) -> tuple[Path | None, str]:
    """`path/to/file.py:Name` as (path, Name), a plain name as (None, name); a label before either is left out."""
    label = _LABELLED.fullmatch(spec)
    bare = spec if label is None else label[2]
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", bare)
    return (Path(match[1]), match[2]) if match else (None, bare)


def is_foreign(spec: str) -> bool:
    """Whether the code comes from a file or from another package, and not with attnbench."""
    path, name = split(variant(spec)[0])
    return path is not None or name not in stems(PACKAGE)


def check_specs(specs: Iterable[str]) -> None:
    """Check that each implementation exists and that no two share a name, without importing any.

    Raises:
        ValueError: what was given, what is allowed and, for a near miss, what was probably meant.
    """
    owners: dict[str, str] = {}
    known = implementation_names()
    for spec in specs:
        base, option = variant(spec)
        if option and option not in OPTIONS:
            raise ValueError(f"{spec}: {unknown('option', option, OPTIONS)}")
        path, attribute = split(base)
        if path is not None:
            _check_file(path, attribute)
        elif attribute.endswith(".py"):
            raise ValueError(
                f"{base} names a file alone: add what to take from it, as in {base}:NAME; "
                f"attnbench check {base} checks all that it holds"
            )
        elif attribute not in known:
            raise ValueError(unknown("implementation", attribute, known, "; or give path/to/file.py:Name"))
        name = name_of(spec)
        if not name.isprintable() or not re.search(r"\w", name) or len(name) > LONGEST_NAME:
            allowed = f"a name has printable characters, a letter or digit among them, and no more than {LONGEST_NAME}"
            raise ValueError(f"{spec!r} is not allowed: {allowed}; give another, as in other={spec.split('=')[-1]}")
        is_own = path is not None and name_of(base) in known and not _LABELLED.fullmatch(spec)
        clash = owners.get(name, name if is_own else spec)
        if clash != spec:
            raise ValueError(
                f"{spec} and {clash} would share the name {name}: give another, as in OTHER={spec.split('=')[-1]}"
            )
        owners[name] = spec


def labelled(specs: Iterable[str]) -> list[str]:
    """The specs, those of files with the file's stem before their name where another has the same name.

    `mine.py:sdpa` becomes `mine.sdpa=mine.py:sdpa`, and so do two files' `attention`.
    """
    specs = list(dict.fromkeys(specs))
    names, known = [name_of(spec) for spec in specs], set(implementation_names())
    found: list[str] = []
    for spec, name in zip(specs, names, strict=True):
        path, attribute = split(variant(spec)[0])
        is_shared = names.count(name) > 1 or name_of(variant(spec)[0]) in known
        if path is not None and is_shared and not _LABELLED.fullmatch(spec) and attribute != "IMPLEMENTATION":
            found.append(f"{path.stem}.{name}={spec}")
        else:
            found.append(spec)
    return found


def held(path: Path) -> list[str]:
    """The implementations in a file, in its order, without running it.

    They have public names and are functions whose first three parameters are query, key and value, or q, k and v;
    classes with `attend`, `from_weights` or such a `forward`, and modules made of these; and values of `adapt`,
    `Implementation` or `functools.partial`, one or several in an assignment. Imported names are not among them.

    Raises:
        ValueError: the file cannot be read, or holds none.
    """
    body = _parsed(path).body
    attending = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and _attends(node)}
    found = [name for node in body for name in _names_of(node, attending) if not name.startswith("_")]
    if not found:
        raise ValueError(
            f"{path} holds nothing that looks like an implementation: a function of query, key and value, a class with "
            f"attend, or a value that adapt made (docs/adapters.md); name it, as in {path}:NAME"
        )
    return list(dict.fromkeys(found))


def imported(spec: str) -> set[str]:
    """The packages that a spec's file imports, as its source says; none for a spec that is no file."""
    path, _ = split(variant(spec)[0])
    try:
        nodes = list(ast.walk(_parsed(path))) if path is not None else []
    except ValueError:  # the check of specs says why
        return set()
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


HEADS = (["query", "key", "value"], ["queries", "keys", "values"], ["q", "k", "v"])


def _attends(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function or class takes query, key and value, or is made from weights."""
    if isinstance(node, ast.ClassDef):
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        has_own = bool({"attend", "from_weights"} & set(methods))
        return has_own or ("forward" in methods and _heads(methods["forward"].args)[1:] in HEADS)
    return _heads(node.args)[:3] in HEADS


def _heads(arguments: ast.arguments) -> list[str]:
    """The names of the first four parameters by position."""
    return [each.arg.lower() for each in (*arguments.posonlyargs, *arguments.args)[:4]]


def _names_of(node: ast.stmt, attending: Collection[str]) -> list[str]:
    """The names that a statement binds to implementations."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name] if name in attending else []
        case ast.Assign(targets=targets, value=value):
            pass
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            targets = [target]
        case _:
            return []
    is_made = any(_makes(each, attending) for each in ast.walk(value))
    names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return names if is_made else []


def _makes(node: ast.AST, attending: Collection[str]) -> bool:
    """Whether an expression calls `adapt` or `Implementation`, makes one of the file's modules, or binds a function."""
    match node:
        case ast.Call(func=ast.Name(id="adapt" | "Implementation") | ast.Attribute(attr="adapt" | "Implementation")):
            return True
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[bound, *_]):
            name = bound.id if isinstance(bound, ast.Name) else bound.attr if isinstance(bound, ast.Attribute) else ""
            return name == SDPA or name in attending
        case ast.Call(func=ast.Name(id=name)):
            return name in attending and name[:1].isupper()
    return False


def given(spec: str) -> str:
    """The arguments of the function in a file, or of a class's `attend`, in words; "" for any other spec.

    It is read from the source, without running it.
    """
    path, attribute = split(variant(spec)[0])
    try:
        body = _parsed(path).body if path is not None else []
    except ValueError:  # it was there when the specs were checked
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return _passed_to(node)
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            is_bound = any(ast.unparse(base).endswith("Attention") for base in node.bases)  # it is given a BoundMask
            is_bound = is_bound or "from_weights" in methods
            return _passed_to(methods["attend"]) if "attend" in methods and not is_bound else ""
    return ""


def _passed_to(node: ast.FunctionDef) -> str:
    names = {ALIASES.get(each.arg, each.arg): each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    names |= {"mask": names.get("mask", "mask")} if node.args.kwarg else {}
    return passed_words(names[keyword] for keyword in KEYWORDS if keyword in names)


def passed_words(keywords: Iterable[str]) -> str:
    """The arguments of a function that is passed these by name."""
    return ", ".join(("query", "key", "value", *keywords))


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not Python that can be read: {error}") from None


def unknown(kind: str, given: str, known: Iterable[str], more: str = "") -> str:
    """The message for a name that does not exist: the given one, a near one, and all."""
    names = list(known)
    return f"there is no {kind} {given or repr(given)}{meant(given, names)}; choose among {', '.join(names)}{more}"


def _check_file(path: Path, attribute: str) -> None:
    tree, text = _parsed(path), path.read_text(encoding="utf-8")
    try:
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except SyntaxError as error:  # such as a return outside of a function, which is no error of grammar
        raise ValueError(f"{path} is not Python that can be read: {error}") from None
    defined = sorted(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
    takes_all = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if attribute not in defined and not takes_all:
        raise ValueError(unknown("name", attribute, defined, f" in {path}"))


def digest(spec: str) -> str:
    """Eight hex digits that identify the source file of a spec; "" for an installed package, which has a version."""
    path, attribute = split(variant(spec)[0])
    if path is None and attribute in stems(PACKAGE):
        module = importlib.util.find_spec(f"{PACKAGE}.{attribute}")
        path = Path(module.origin) if module is not None and module.origin is not None else None
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def load(spec: str) -> Any:  # noqa: ANN401 - contract/loading.py makes an Implementation of whatever it is
    """Import the value that `name` or `path/to/file.py:Name` names.

    Raises:
        ValueError: the module holds no such value.
        Exception: whatever importing somebody's module raises.
    """
    path, attribute = split(spec)
    if path is not None:
        digits = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # two files may share a name
        names = (f"attnbench_plug_{path.stem}_{digits}_{number}" for number in count())  # each load is a module anew
        found = importlib.util.spec_from_file_location(next(name for name in names if name not in sys.modules), path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        if str(path.parent.resolve()) not in sys.path:
            sys.path.append(str(path.parent.resolve()))  # as for any script: it can import files next to it
        sys.modules[found.name] = module  # as for any module: torch.compile, dataclasses and pickle look it up there
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[found.name]
            raise
    elif attribute in stems(PACKAGE):
        module, attribute = importlib.import_module(f"{PACKAGE}.{attribute}"), "IMPLEMENTATION"
    else:
        return installed()[attribute].load()
    if not hasattr(module, attribute):
        raise ValueError(f"{spec}: the module holds no {attribute}")
    return getattr(module, attribute)
