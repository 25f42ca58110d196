"""Find implementations and other plugs without importing more than is needed.

A plug is a file of a package folder that defines a constant such as COMMAND. The plug has the name of the file, without
.py. `stems` lists the names without importing anything, so that it is quick and a broken plug does not affect the
others. A spec names an implementation: NAME, FILE.py:NAME or LABEL=SPEC, with an option such as +compile at the end.
"""

import ast
import hashlib
import importlib
import importlib.util
import re
import symtable
import sys
from collections.abc import Collection, Iterable
from functools import cache
from importlib.machinery import PathFinder
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnbench.units import did_you_mean

if TYPE_CHECKING:  # importing it takes as long as the rest of --help
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "attnbench.implementations"
IMPLEMENTATIONS = "implementations"  # name of the folder, in this package and in compared states of the code
PACKAGE = f"attnbench.{IMPLEMENTATIONS}"
OPTIONS = ("compile",)  # words after a plus, which run the same implementation in another way (contract/loading.py)
KEYWORDS = (
    *("mask", "is_causal", "is_causal_bottom_right", "bias", "scale", "sinks", "softcap"),
    *("window_size", "num_kv_heads", "dropout", "world_size", "bound_mask"),
)
"""Arguments that a plain function may receive by name, after query, key and value (contract/functions.py)."""
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
"""Names that other packages use for arguments in KEYWORDS, each mapped to the name in KEYWORDS."""
PAGED = {
    "query": ("query", "q"),
    "key_cache": ("key_cache", "k_cache", "key_pages", "k_pages", "key", "k"),
    "value_cache": ("value_cache", "v_cache", "value_pages", "v_pages", "value", "v"),
    "block_table": ("block_table", "block_tables", "page_table", "page_tables"),
    "seqused_k": ("seqused_k", "cache_seqlens", "seq_lens", "context_lens", "kv_lens"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seq_q", "query_start_loc", "qo_indptr"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seq_k"),
    "max_seqlen_q": ("max_seqlen_q", "max_q", "max_query_len"),
    "max_seqlen_k": ("max_seqlen_k", "max_k", "max_seq_len"),
    "k_scale": ("k_scale", "k_descale"),
    "v_scale": ("v_scale", "v_descale"),
    "softmax_scale": ("softmax_scale", "scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size",),
    "enable_gqa": ("enable_gqa",),
}
"""Arguments of functions that read a paged cache (contract/pages.py), each with its names in flash-attn, PyTorch and
vLLM."""
READ_PAGES = (
    *("flash_attn_2_paged", "flashinfer_paged", "flex_paged"),
    *("paged_gather", "paged_loop", "torch_varlen_paged"),
)
"""Built-in implementations that read a paged cache; in a run without a paged cache they take part only if named."""
DISTRIBUTING = ("all_gather", "context_parallel", "ring", "ulysses", "zigzag_ring")
"""Built-in implementations that compute with several ranks; in a run with one rank they take part only if named."""
SDPA = "scaled_dot_product_attention"
HEADS = (["query", "key", "value"], ["queries", "keys", "values"], ["q", "k", "v"])  # names of the first parameters
LONGEST_NAME = 100  # characters
_LABELLED = re.compile(r"([^=/]+)=(.+)")  # LABEL=SPEC: the spec is named LABEL


def stems(package: str) -> list[str]:
    """Return the sorted names of the public modules of a package, without importing them.

    Raises:
        ValueError: the package cannot be found.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"the package {package} cannot be found; is attnbench installed?")
    return sorted(file.stem for folder in spec.submodule_search_locations for file in Path(folder).glob("[a-z]*.py"))


def plugs(package: str, constant: str) -> dict[str, Any]:
    """Return the value of `constant` in each module of `package` that defines it, by the module's name, sorted.

    If the value is a dict, its items are returned instead. Modules in the package's HELPERS are not imported.
    """
    helpers = getattr(importlib.import_module(package), "HELPERS", ())
    found: dict[str, Any] = {}
    for name in sorted({*stems(package)} - {*helpers}):
        value = getattr(importlib.import_module(f"{package}.{name}"), constant, None)
        found |= value if isinstance(value, dict) else {} if value is None else {name: value}
    return dict(sorted(found.items()))


def installed() -> "dict[str, EntryPoint]":
    """Return the entry points of the implementations in other installed packages, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Read the tables `facts` and `looks` of catalogue.toml, each with an entry for each implementation, by name."""
    from importlib.resources import files  # here, because --help needs neither

    import msgspec

    text = files(PACKAGE).joinpath("catalogue.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, dict[str, Any]])


def implementation_names() -> list[str]:
    """Return all known names of implementations: those in the folder, then those of installed packages."""
    own = stems(PACKAGE)
    return own + sorted(set(installed()) - set(own))


def name_of(spec: str) -> str:
    """Return the name of a spec in a run: its label; else the file's stem for FILE.py:IMPLEMENTATION; else its NAME.

    Without a label, an option is part of the name, as in `fused+compile`.
    """
    if (label := _LABELLED.fullmatch(spec)) is not None:
        return label[1]
    base, option = variant(spec)
    path, attribute = split(base)
    name = path.stem if path is not None and attribute == "IMPLEMENTATION" else attribute
    return f"{name}+{option}" if option else name


def variant(spec: str) -> tuple[str, str]:
    """Split `name+option` or `path/to/file.py:Name+option` at the plus; without an option, (spec, "")."""
    match = re.fullmatch(r"(.*\w)\+(\w+)", spec)
    return (match[1], match[2]) if match else (spec, "")


def split(spec: str) -> tuple[Path | None, str]:
    """Split `path/to/file.py:Name` into (path, Name), and a plain name into (None, name); a label is dropped."""
    label = _LABELLED.fullmatch(spec)
    bare = spec if label is None else label[2]
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", bare)
    return (Path(match[1]), match[2]) if match else (None, bare)


def is_foreign(spec: str) -> bool:
    """Return whether the code of a spec comes from a file or another package, and not from attnbench."""
    path, name = split(variant(spec)[0])
    return path is not None or name not in stems(PACKAGE)


def check_specs(specs: Iterable[str]) -> None:
    """Check that each implementation exists and that no two share a name, without importing any.

    Raises:
        ValueError: a file cannot be read, an implementation or option is unknown, or a name is taken or not allowed;
            the message says what to give.
    """
    owners: dict[str, str] = {}
    known = implementation_names()
    for spec in specs:
        base, option = variant(spec)
        if option and option not in OPTIONS:
            raise ValueError(f"{spec}: {unknown('option', option, OPTIONS)}")
        path, attribute = split(base)
        if path is not None:
            tree, symbols = _read(path)
            defined = sorted(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            if attribute not in defined and not any(node.names[0].name == "*" for node in imports):
                raise ValueError(unknown("name", attribute, defined, f" in {path}"))
        elif attribute.endswith(".py"):
            raise ValueError(f"{base} names a file alone: name what to take from it, as in {base}:NAME")
        elif attribute not in known:
            raise ValueError(unknown("implementation", attribute, known, "; or give path/to/file.py:Name"))
        name, again = name_of(spec), f"give another, as in other={spec.split('=')[-1]}"
        if not name.isprintable() or not re.search(r"\w", name) or len(name) > LONGEST_NAME:
            allowed = f"a name has printable characters, a letter or digit among them, and no more than {LONGEST_NAME}"
            raise ValueError(f"{spec!r} is not allowed: {allowed}; {again}")
        is_own = path is not None and name_of(base) in known and not _LABELLED.fullmatch(spec)
        clash = owners.setdefault(name, name if is_own else spec)
        if clash != spec:
            raise ValueError(f"{spec} and {clash} would share the name {name}: {again}")


def labelled(specs: Iterable[str]) -> list[str]:
    """Drop repeated specs; label a spec of a file as STEM.NAME if another implementation has the same name.

    `mine.py:sdpa` becomes `mine.sdpa=mine.py:sdpa`. If several files have a function of the same name, all get labels.
    """
    specs = list(dict.fromkeys(specs))
    names, known = [name_of(spec) for spec in specs], set(implementation_names())
    labels = []
    for spec, name in zip(specs, names, strict=True):
        path, attribute = split(variant(spec)[0])
        is_shared = names.count(name) > 1 or name_of(variant(spec)[0]) in known
        is_free = path is None or attribute == "IMPLEMENTATION" or _LABELLED.fullmatch(spec)
        labels.append(f"{path.stem}.{name}={spec}" if path and is_shared and not is_free else spec)
    return labels


def discover_implementations(path: Path) -> list[str]:
    """Find the implementations in a file without running it; return their names in the file's order.

    An implementation has a public name and is one of these:
    - a function whose first three parameters are named as in HEADS, or whose parameters are those of a paged cache;
    - a class with a method `attend`, or with a method `forward` with parameters as in HEADS;
    - a variable that holds an instance of one of these classes, a result of `adapt` or `Implementation`, or a
      `functools.partial` of one of these functions or of SDPA.

    These are ignored: imported names, functions that the file passes to `adapt`, and functions that the file calls and
    that need arguments other than those that attnbench can pass.

    Raises:
        ValueError: the file cannot be read, or has no implementation.
    """
    tree, _ = _read(path)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {_last_name(node.func) for node in calls}
    helpers = {name for name, node in defined.items() if name in called and _needs_more(node)}
    for call in calls:
        if _last_name(call.func) == "adapt":
            helpers |= {each.id for each in ast.walk(call) if isinstance(each, ast.Name)}
    attending = {name for name, node in defined.items() if _attends(node)} - helpers
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in attending:
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and any(_makes(each, attending) for each in ast.walk(node)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    names = list(dict.fromkeys(name for name in found if not name.startswith("_")))
    if not names:
        raise ValueError(
            f"{path} holds nothing that looks like an implementation: a function of query, key and value, a class with "
            f"attend, or a value that adapt made (docs/adapters.md); name it, as in {path}:NAME"
        )
    return names


def plug_in(path: Path) -> str:
    """Return the name under which a file of a folder `implementations` defines its implementation.

    It is `attention` if the file defines this name and not IMPLEMENTATION, and otherwise IMPLEMENTATION.
    """
    try:
        names = {each.get_name() for each in _read(path)[1] if each.is_assigned()}
    except ValueError:  # the check of specs reports the error
        names = set()
    return "attention" if "attention" in names and "IMPLEMENTATION" not in names else "IMPLEMENTATION"


def imported(spec: str) -> set[str]:
    """Return the names of the top-level packages that a spec's file imports; empty if the spec has no file."""
    path = file_of(spec)
    return set() if path is None else imports_of(path)


def file_of(name: str) -> Path | None:
    """Return the file of a spec, or of FILE.py (which stands for all implementations in it); None without a file."""
    bare, _ = variant(name)
    return split(f"{bare}:any" if bare.endswith(".py") else bare)[0]


def imports_of(path: Path) -> set[str]:
    """Return the names of the top-level packages that the source of a file imports; empty if it cannot be read."""
    try:
        nodes = list(ast.walk(_read(path)[0]))
    except ValueError:  # the check of specs reports the error
        return set()
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names if name}


def expand_spec(name: str) -> list[str]:
    """Return the specs of all implementations in a file if `name` is FILE.py; otherwise return only `name`.

    Raises:
        ValueError: the file cannot be read, or has no implementation.
    """
    if not name.endswith(".py") or "=" in name:
        return [name]
    return [f"{name}:{each}" for each in discover_implementations(Path(name))]


def sources(specs: Iterable[str]) -> list[Path]:
    """Return the files of specs, and all modules in the files' folders that they import, directly or indirectly."""
    found: dict[Path, None] = {}
    due = [path for path in map(file_of, specs) if path is not None]
    while due:
        path = due.pop().resolve()
        if path in found or not path.is_file():
            continue
        found[path] = None
        for name in imports_of(path):
            due += [path.with_name(f"{name}.py"), *path.with_name(name).rglob("*.py")]
    return list(found)


def _attends(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a function takes query, key and value or a paged cache, or a class has a method for attention.

    The method is `attend`, or an undecorated `forward` that takes query, key and value.
    """
    if isinstance(node, ast.FunctionDef):
        return _takes_heads(node)
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    forward = methods.get("forward")  # a decorated one belongs to an autograd.Function and has no self
    return "attend" in methods or (forward is not None and not forward.decorator_list and _takes_heads(forward, 1))


def _takes_heads(function: ast.FunctionDef, place: int = 0) -> bool:
    names = [each.arg.lower() for each in (*function.args.posonlyargs, *function.args.args)]
    return names[place : place + 3] in HEADS or (place == 0 and _names_pages(function))


def _names_pages(function: ast.FunctionDef) -> bool:
    args = function.args
    names = {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    return bool(names & {*PAGED["block_table"]}) and bool(names & {*PAGED["query"]})


def is_dense(spec: str) -> bool:
    """Return whether a spec takes dense keys, so that the harness gathers a paged cache; False if its file is gone."""
    path, _ = split(variant(spec)[0])
    return not reads_pages(spec) and (path is None or path.exists())


def reads_pages(spec: str) -> bool:
    """Return whether a spec reads a paged cache: it is in READ_PAGES, or its function has the parameters for one."""
    path, attribute = split(variant(spec)[0])
    if path is None:
        return attribute in READ_PAGES
    try:
        tree, _ = _read(path)
    except ValueError:  # the check of specs reports the error
        return False
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return attribute in named and _names_pages(named[attribute])


def _needs_more(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a function needs arguments that attnbench cannot pass; False for a class."""
    if isinstance(node, ast.ClassDef):
        return False
    positional, by_name = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
    if _names_pages(node):
        return False
    required = positional[3 : len(positional) - len(node.args.defaults)]
    required += [each for each, default in zip(by_name, node.args.kw_defaults, strict=True) if default is None]
    return any(each.arg not in {*KEYWORDS, *ALIASES} for each in required)


def _makes(node: ast.AST, attending: Collection[str]) -> bool:
    """Return whether an expression calls `adapt`, `Implementation`, a class in `attending`, or `partial`.

    The first argument of `partial` must be SDPA or in `attending`.
    """
    if not isinstance(node, ast.Call):
        return False
    name = _last_name(node.func)
    if name == "partial" and node.args:
        return _last_name(node.args[0]) in {SDPA, *attending}
    return name in {"adapt", "Implementation"} or (name in attending and name[:1].isupper())


def _last_name(node: ast.expr) -> str:
    """Return the name of a variable, or the last part of a dotted name; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _read(path: Path) -> tuple[ast.Module, list[symtable.Symbol]]:
    """Return the syntax tree and the top-level names of a file, without running it.

    Raises:
        ValueError: the file cannot be read, or is not Python.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, str(path))
        return tree, symtable.symtable(source, str(path), "exec").get_symbols()  # also rejects duplicate parameters
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None


def unknown(kind: str, given: str, known: Iterable[str], more: str = "") -> str:
    """Return the error message about an unknown name, with a suggestion and all known names."""
    names = list(known)
    return (
        f"there is no {kind} {given or repr(given)}{did_you_mean(given, names)}; choose among {', '.join(names)}{more}"
    )


def require_known(kind: str, given: Iterable[str], known: Collection[str], more: str = "") -> None:
    """Check that all names in `given` are in `known`; the error message calls a name by `kind`, such as "axis".

    Raises:
        ValueError: a name is unknown; the message has all known ones.
    """
    for name in given:
        if name not in known:
            raise ValueError(unknown(kind, name, known, more))


def digest(spec: str) -> str:
    """Return 8 hex digits of the SHA-256 of a spec's source file; "" for an installed package, which has a version."""
    path, attribute = split(variant(spec)[0])
    if path is None and attribute in stems(PACKAGE):
        module = importlib.util.find_spec(f"{PACKAGE}.{attribute}")
        path = Path(module.origin) if module is not None and module.origin is not None else None
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def _import_namesake(path: Path) -> None:
    """Import the installed package that has the same name as a file; otherwise the file would import itself.

    Raises:
        ValueError: no such package is installed.
    """
    folder = path.parent.resolve()
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder]
    found = PathFinder.find_spec(path.stem, elsewhere)
    if found is None or found.loader is None:
        raise ValueError(
            f"{path} imports {path.stem}, which is not installed, and would import itself: rename the file, or install "
            f"{path.stem}"
        )
    sys.modules[path.stem] = package = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)


def _load_file(path: Path) -> ModuleType:
    """Run a file as a new module, which can import the files next to it like a script; use no stored bytecode."""
    digits = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # two files may share a name
    names = (f"attnbench_plug_{path.stem}_{digits}_{number}" for number in count())
    name = next(name for name in names if name not in sys.modules)
    module = ModuleType(name)
    module.__file__ = str(path)
    if path.stem in imported(f"{path}:{path.stem}") and path.stem not in sys.modules:
        _import_namesake(path)
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    sys.modules[name] = module  # as for any module: torch.compile, dataclasses and pickle need it there
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102 - the user's own code
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(spec: str) -> Any:  # noqa: ANN401 - contract/loading.py accepts any value
    """Import the value that a spec without `+option` names, from its file, attnbench or another installed package.

    A plain name must be that of a built-in implementation, or of one that an installed package provides.

    Raises:
        ValueError: the module does not define this value.
        Exception: any exception of the imported module.
    """
    path, attribute = split(spec)
    if path is not None:
        module = _load_file(path)
    elif attribute in stems(PACKAGE):
        module, attribute = importlib.import_module(f"{PACKAGE}.{attribute}"), "IMPLEMENTATION"
    else:
        return installed()[attribute].load()
    if not hasattr(module, attribute):
        raise ValueError(f"{spec}: the module holds no {attribute}")
    return getattr(module, attribute)
