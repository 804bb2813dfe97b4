"""Reads the messages of the package from its source.

``messages()`` lists the sentences of the errors that a user meets, and those in the log.
``reasons()`` lists the reasons why a layer keeps vLLM's own backend, ``mixed_graph_reasons()`` why
mixed steps run in piecewise CUDA graphs. ``...`` stands for each value that is filled in at run
time.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_prefixshare.vllm_plugin import BACKEND_NAME
from vllm_prefixshare.vllm_plugin.hooks.selection import ENV_VAR
from vllm_prefixshare.vllm_plugin.observability.metrics import VARIABLE

PACKAGE = Path(__file__).parents[2] / "vllm_prefixshare"
#: Errors whose text a user reads, and functions that write to the log.
ERRORS = {"PrefixShareError", "CompileError", "_compile_errors"}
LOGGERS = {"warning", "warning_once", "info", "info_once", "log", "_on_failure"}


#: Modules whose reasons are not about layers: shared host work, and CUDA graphs of mixed steps.
MIXED_GRAPHS = "vllm_plugin/step/mixed_graphs.py"
NOT_ABOUT_LAYERS = ("vllm_plugin/prompts/", MIXED_GRAPHS)
#: Constants that a sentence fills in, as a reader sees them.
NAMES = {"BACKEND_NAME": BACKEND_NAME, "ENV_VAR": ENV_VAR, "VARIABLE": VARIABLE}


def text_of(node: ast.AST) -> str:
    """The string as written, with ``...`` for each filled-in value; "" for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        text = "".join(map(_part, node.values))
        text = text.replace("{reason}", "...")  # filled in by _compile_errors
        return re.sub(r"\.{4,}", "...", text)  # a value and a full stop, or two values
    return ""


def _part(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    return NAMES.get(ast.unparse(node.value), "...")


#: A clause that tells the reader what to do, or what a value must be.
REMEDY = re.compile(
    r"[:,;)] (please )?(\w+ )?(add|call|choose|commit|describe|free|give|install|leave out|lower"
    r"|make|measure|name|pass|plan|reinstall|report|restart|see|send|set|start|take|trace|unset|use|wait"
    r"|write)\b|\bmust (ascend|be|come|divide|have|rise)\b|\bneeds? [^:]*:"
)


def names_remedy(message: str) -> bool:
    """Whether a sentence says itself what to do, so that a page need not."""
    return bool(REMEDY.search(message))


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, by path."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            yield ast.unparse(node.func).rpartition(".")[2], node


def messages() -> dict[str, str]:
    """Each sentence, and the module that holds it. Texts that only wrap another are left out."""
    found = {}
    for path, tree in modules().items():
        for name, call in _calls(tree):
            text = text_of(call.args[0])
            for argument in call.args[1:]:
                text = text.replace("%s", NAMES.get(ast.unparse(argument), "..."), 1)
            if name in ERRORS | LOGGERS and re.sub(r"\.\.\.|%s", "", text).strip(" :"):
                found[re.sub(r"\.{4,}", "...", text)] = path
    return found


def reasons() -> dict[str, str]:
    """Each reason for the fallback of a layer, and the module that gives it."""
    found = {}
    for path, tree in modules().items():
        if not path.startswith("vllm_plugin/") or path.startswith(NOT_ABOUT_LAYERS):
            continue
        nodes = [call.args[0] for name, call in _calls(tree) if name in ("fall_back", "Rule")]
        nodes += [node.body for node in nodes if isinstance(node, ast.Lambda)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
                nodes.append(node.value)
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_refusal"):
                nodes += _said_in(node)
        for node in nodes:
            if text := text_of(node):
                found[text] = path
    return found


def mixed_graph_reasons() -> set[str]:
    """Each reason for piecewise CUDA graphs in mixed steps."""
    tree = modules()[MIXED_GRAPHS]
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    (refusal,) = (f for f in functions if f.name.endswith("_refusal"))
    return set(filter(None, map(text_of, _said_in(refusal))))


def _said_in(function: ast.FunctionDef) -> list[ast.AST]:
    """The expressions that a function may return as a reason."""
    said: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            said += node.values
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            said.append(node.elts[1])
        elif isinstance(node, ast.Return) and node.value is not None:
            is_choice = isinstance(node.value, ast.IfExp)
            said += ast.iter_child_nodes(node.value) if is_choice else [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
            said += node.args
    return said
