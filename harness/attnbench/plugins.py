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
from collections.abc import Iterable
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
KEYWORDS = ("mask", "is_causal", "bias", "scale", "sinks", "num_kv_heads", "dropout")
"""What a plain function may be given by name, after query, key and value (contract/functions.py)."""
LONGEST_NAME = 100
_LABELLED = re.compile(r"([^=/]+)=(.+)")
"""`LABEL=SPEC`: takes part under another name than its own."""


def stems(package: str) -> list[str]:
    """The names of the modules in a package, sorted, none of them imported.

    Raises:
        ValueError: the package cannot be found.
    """
    return sorted(file.stem for file in _files(package))


def plugs(package: str, constant: str) -> dict[str, Any]:
    """The value `constant` of every module of `package` with a line that begins with this word, by the module's stem.

    A dict stands for several, each by its own name. Only these modules are imported.
    """
    line = re.compile(rf"^{constant}\b", re.MULTILINE)
    found: dict[str, Any] = {}
    for file in _files(package):
        if line.search(file.read_text(encoding="utf-8")):
            value = getattr(importlib.import_module(f"{package}.{file.stem}"), constant)
            found |= value if isinstance(value, dict) else {file.stem: value}
    return dict(sorted(found.items()))


def _files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"the package {package} cannot be found; is attnbench installed?")
    return [file for folder in spec.submodule_search_locations for file in Path(folder).glob("[a-z]*.py")]


def installed() -> "dict[str, EntryPoint]":
    """Implementations that other installed packages offer, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def implementation_names() -> list[str]:
    """Every implementation that can be named: those in the folder, then those of installed packages."""
    own = stems(PACKAGE)
    return own + sorted(set(installed()) - set(own))


def distributing() -> list[str]:
    """Implementations in the folder that compute with several ranks, as their files say; none is imported.

    Where there is one rank alone they take part only if they are named.
    """
    line = re.compile(r"^    distributes=True,$", re.MULTILINE)
    return [file.stem for file in sorted(_files(PACKAGE)) if line.search(file.read_text(encoding="utf-8"))]


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
            raise ValueError(f"{spec} and {clash} would share the name {name}: rename one of them")
        owners[name] = spec


def held(path: Path) -> list[str]:
    """What a file holds that looks like an implementation, in its order, without running it.

    Public functions whose first three parameters begin with q, k and v; classes with `attend` or `from_weights`; and
    values made by `adapt` or `Implementation`.

    Raises:
        ValueError: the file cannot be read, or holds none.
    """
    found = [name for node in _parsed(path).body for name in _held_by(node) if not name.startswith("_")]
    if not found:
        raise ValueError(
            f"{path} holds nothing that looks like an implementation: a function of query, key and value, a class with "
            f"attend, or a value that adapt made (docs/adapters.md); name it, as in {path}:NAME"
        )
    return list(dict.fromkeys(found))


def _held_by(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(args=ast.arguments(posonlyargs=first, args=rest)):
            letters = [each.arg[0] for each in (*first, *rest)[:3]]
            return [node.name] if letters == ["q", "k", "v"] else []
        case ast.ClassDef(body=body):
            methods = {each.name for each in body if isinstance(each, ast.FunctionDef)}
            return [node.name] if methods & {"attend", "from_weights"} else []
        case ast.Assign(targets=targets, value=ast.Call(func=ast.Name(id=maker) | ast.Attribute(attr=maker))):
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            return names if maker in {"adapt", "Implementation"} else []
    return []


def given(spec: str) -> str:
    """What the function in a file, or the class by its `attend`, is given, in words; "" for any other spec.

    It is read from the source, without running it.
    """
    path, attribute = split(variant(spec)[0])
    try:
        body = _parsed(path).body if path is not None else []
    except ValueError:  # it was there when the specs were checked
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return _given_to(node)
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            is_bound = any(ast.unparse(base).endswith("Attention") for base in node.bases)  # it is given a BoundMask
            is_bound = is_bound or "from_weights" in methods
            return _given_to(methods["attend"]) if "attend" in methods and not is_bound else ""
    return ""


def _given_to(node: ast.FunctionDef) -> str:
    names = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    names |= {"mask"} if node.args.kwarg else set()
    return given_words([name for name in KEYWORDS if name in names])


def given_words(keywords: Iterable[str]) -> str:
    """What a function is given that takes these of KEYWORDS."""
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
    _parsed(path)
    text = path.read_text(encoding="utf-8")
    try:
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except SyntaxError as error:  # such as a return outside of a function, which is no error of grammar
        raise ValueError(f"{path} is not Python that can be read: {error}") from None
    defined = sorted(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
    if attribute not in defined and re.search(r"^\s*from .+ import \*", text, re.MULTILINE) is None:
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
