"""A cost table belongs to a version of its kernel: code that changes needs a new version."""

import io
import tokenize
from hashlib import sha256
from pathlib import Path

import pytest

import vllm_prefixshare.kernels as kernels
from vllm_prefixshare.planning.costs.lookup import GPU_KERNELS, KERNELS, SHIPPED
from vllm_prefixshare.planning.costs.table import CostTable

FOLDER = Path(kernels.__file__).parent
#: what GPU kernels have in common, in addition to their own folders
COMMON = ("common", "merge_states.py")
#: version of a kernel -> digest of its code when the version was given. A digest alone may be
#: entered for a change that a measurement shows to cost no time.
DIGESTS = {
    "hopper-1": "ff3e6e63ea4b",
    "portable-4": "e1e45c625547",
    "mla_hopper-1": "c074b383e018",
}
LAYOUT = {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}
IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


def code_of(text: str) -> str:
    """The code of a module without comments, docstrings and spaces."""
    found, begins = [], True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in IGNORED or (token.type == tokenize.STRING and begins):
            continue
        begins = token.type in LAYOUT
        found.append(LAYOUT.get(token.type, "".join(token.string.split())))
    return "".join(found).replace("{;", "{")


def digest_of(kernel: str) -> str:
    """Names and code of the modules of a GPU kernel, as a short hash."""
    found = sha256()
    files: list[Path] = []
    for name in (kernel, *COMMON):
        path = FOLDER / name
        files += sorted(path.glob("*.py")) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(FOLDER).as_posix()
        found.update(f"{name}\0{code_of(file.read_text())}\0".encode())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_a_kernel_whose_code_changes_has_a_new_version(kernel):
    version, digest = KERNELS[kernel], digest_of(kernel)
    assert digest == DIGESTS.get(version), (
        f"the code of {kernel} is not that of {version}: give it a new version in costs/lookup.py "
        f"and measure its tables again, and enter the digest {digest} here."
    )


def test_shipped_tables_are_of_kernels_that_exist():
    for file in SHIPPED.glob("*.json"):
        assert CostTable.load(file).fingerprint.kernel in DIGESTS


def test_comments_change_no_version_and_code_does():
    text = 'def tile(n):\n    """Doc."""\n    for _ in range(n):\n        step()\n    end()\n'
    same = text.replace('"""Doc."""', '# why\n\n    "Another."').replace("range(n)", "range( n )")
    assert code_of(same) == code_of(text)
    for old, new in (("range(n)", "range(n + 1)"), ("    end()", "        end()")):
        assert code_of(text.replace(old, new)) != code_of(text)
