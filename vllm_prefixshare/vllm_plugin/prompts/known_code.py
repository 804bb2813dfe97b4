"""Whether functions of the installed vLLM are the code that a part was written for.

A part that replaces a vLLM function is exact only for the code that it was written for. Signatures
do not show a change of behaviour, so the code is compared, without docstrings, comments and layout.
"""

import ast
import hashlib
import inspect
import pkgutil
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from vllm_prefixshare.vllm_plugin.prompts.parts import report_once

_LAYOUT = str.maketrans("", "", "() \n")


def fingerprint(function: Any) -> str:
    """Twelve hexadecimal digits that identify the code of a function; if it is wrapped, of the
    original.

    Raises:
        OSError: its source is missing.
        TypeError: it is not written in Python.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    # Python 3.10 writes some parentheses that later versions do not
    text = ast.unparse(tree).translate(_LAYOUT)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_known(part: str, known: Mapping[str, Collection[str]]) -> bool:
    """Whether each function has a known fingerprint; logs the first unknown one.

    Args:
        part: the part that relies on the functions.
        known: full name of a function -> its fingerprints in the supported releases; empty for a
            function that a release does not have.
    """
    for name, fingerprints in known.items():
        try:
            found = fingerprint(pkgutil.resolve_name(name))
        except (AttributeError, ImportError, OSError, SyntaxError, TypeError):
            found = ""
        if found not in fingerprints:
            report_once(part, f"{name} of this vLLM is not the code that the part was written for")
            return False
    return True
