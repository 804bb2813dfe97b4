"""Which characters can be adjacent in a match of a pre-tokenizer's regular expression.

A pre-tokenizer divides text into the matches of a pattern and the text between them. The pattern
is parsed into positions, one character class each, with the pairs of positions that can follow each
other in a match (Glushkov's construction). The pairs are a superset of the engine's matches, so
they prove what no match contains, whether it is greedy, lazy or possessive.

The syntax is Oniguruma's (Ruby), which ``tokenizers`` uses. Syntax that is not fully supported
raises `NotExactError`: anchors, look-behind, look-ahead of more than one class, back-references,
flags other than a leading ``(?i)``. Python's ``re`` lacks Unicode properties, so its parser cannot
be used.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tokenizers import Regex, normalizers


class NotExactError(Exception):
    """A tokenizer for which cuts cannot be proven exact. The message is the reason."""


@lru_cache(maxsize=512)
def matched(char_class: str, characters: str) -> str:
    """The subset of ``characters`` that a character class matches in the tokenizers' engine."""
    unmatched = set(normalizers.Replace(Regex(char_class), "").normalize_str(characters))
    return "".join(char for char in characters if char not in unmatched)


class Kind(Enum):
    """How a position treats its character."""

    TAKES = "takes"
    LOOKS_FOR = "(?="
    LOOKS_OUT_FOR = "(?!"


@dataclass(frozen=True, slots=True)
class Position:
    """One occurrence of a character class in a pattern."""

    char_class: str
    kind: Kind = Kind.TAKES


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a pattern, with the positions that may come first and last in it.

    nullable: whether it can match an empty string. single: its position, if it is a single class
        that can match just one character.
    possessive: whether it may take characters that a later item needs.
    """

    nullable: bool
    first: frozenset[int]
    last: frozenset[int]
    single: int | None = None
    possessive: bool = False


_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[A-Za-z_ ]+\}|[sSdDwWrntfv]|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}"
    r"|u[0-9a-fA-F]{4}|[^A-Za-z0-9])"
)
_GROUP = re.compile(r"\((?:\?(?:[a-z]*:|!|=|>|<.|[a-z-]*))?")
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CAPTURES_NOTHING_ELSE = ("(", "(?:", "(?i:", "(?>")
_LOOK_AHEAD = {"(?=": Kind.LOOKS_FOR, "(?!": Kind.LOOKS_OUT_FOR}


class SplitPattern:
    """A parsed pattern.

    positions: its character classes. pairs: (i, j) where position j can come right after i.

    Raises:
        NotExactError: syntax whose matches depend on more than adjacent characters.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.positions: list[Position] = []
        self.pairs: set[tuple[int, int]] = set()
        self._alternatives = self._parse_alternatives(ignore_case=False)
        if self._at != len(source):
            raise NotExactError(f"pattern with {source[self._at :]!r}")

    def spans(self, left: str, right: str) -> bool:
        """Whether a match could take one of ``left`` and then one of ``right``, or distinguish by
        look-ahead whether one of ``right`` or the end of the text follows ``left``.
        """
        for i, j in self.pairs:
            before, after = self.positions[i], self.positions[j]
            if before.kind is not Kind.TAKES or not matched(before.char_class, left):
                continue
            if after.kind is Kind.LOOKS_FOR or matched(after.char_class, right):
                return True
        return False

    def covers(self, characters: str) -> bool:
        """Whether each of ``characters`` is always part of a match, whatever surrounds it: an
        alternative can match that character alone.
        """
        if any(all(item.nullable for item in items) for items in self._alternatives):
            return False  # an empty match would leave its character between two matches
        rest = characters
        for items in self._alternatives:
            required = [item for item in items if not item.nullable]
            if len(required) != 1 or required[0].single is None:
                continue
            before = items[: items.index(required[0])]
            looks = any(
                self.positions[i].kind is not Kind.TAKES for item in items for i in item.first
            )
            if not looks and not any(item.possessive for item in before):
                taken = matched(self.positions[required[0].single].char_class, rest)
                rest = "".join(char for char in rest if char not in taken)
        return not rest

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _parse_alternatives(self, ignore_case: bool) -> list[list[_Item]]:
        if self._source.startswith("(?i)", self._at):
            self._at += len("(?i)")
            ignore_case = True
        alternatives = [self._parse_sequence(ignore_case)]
        while self._peek() == "|":
            self._at += 1
            alternatives.append(self._parse_sequence(ignore_case))
        return alternatives

    def _parse_sequence(self, ignore_case: bool) -> list[_Item]:
        items: list[_Item] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._parse_quantifier(self._parse_atom(ignore_case)))
        for i, item in enumerate(items):
            for later in items[i + 1 :]:
                self._follow(item.last, later.first)
                if not later.nullable:
                    break
        return items

    def _follow(self, last: frozenset[int], first: frozenset[int]) -> None:
        self.pairs |= {(i, j) for i in last for j in first}

    def _parse_quantifier(self, item: _Item) -> _Item:
        simple = {"?": (0, False), "*": (0, True), "+": (1, True)}.get(self._peek())
        counted = _COUNTED.match(self._source, self._at)
        if simple:
            minimum, repeats = simple
            self._at += 1
        elif counted:
            minimum, repeats = int(counted[1] or 0), True
            self._at = counted.end()
        else:
            return item
        suffix = self._peek()
        if suffix and suffix in "?+*":
            if counted or suffix == "*":
                raise NotExactError("pattern that repeats a repetition")
            self._at += 1
        if repeats:
            self._follow(item.last, item.first)
        return _Item(
            item.nullable or minimum == 0,
            item.first,
            item.last,
            item.single if minimum < 2 else None,
            item.possessive or suffix == "+",
        )

    def _position(self, char_class: str, ignore_case: bool, kind: Kind = Kind.TAKES) -> _Item:
        if ignore_case:
            if not char_class.isascii() or re.search(r"\\[ux]", char_class):
                raise NotExactError("pattern that ignores the case of characters beyond ASCII")
            char_class = f"(?i:{char_class})"
        self.positions.append(Position(char_class, kind))
        number = len(self.positions) - 1
        only = frozenset({number})
        takes = kind is Kind.TAKES
        return _Item(not takes, only, only, number if takes else None)

    def _parse_atom(self, ignore_case: bool) -> _Item:
        char = self._peek()
        if char == "(":
            return self._parse_group(ignore_case)
        if char == "[":
            return self._position(self._parse_class(), ignore_case)
        if char == "\\":
            return self._position(self._parse_escape(), ignore_case)
        if char in "^$*+?{":
            raise NotExactError(f"pattern with {char!r}")
        self._at += 1
        return self._position(r"[\s\S]" if char == "." else re.escape(char), ignore_case)

    def _parse_group(self, ignore_case: bool) -> _Item:
        opening = _GROUP.match(self._source, self._at)
        assert opening is not None
        self._at = opening.end()
        if opening[0] in _LOOK_AHEAD:
            char_class = self._parse_class() if self._peek() == "[" else self._parse_escape()
            self._close()
            return self._position(char_class, ignore_case, _LOOK_AHEAD[opening[0]])
        if opening[0] not in _CAPTURES_NOTHING_ELSE:
            raise NotExactError(f"pattern with {opening[0]!r}")
        alternatives = self._parse_alternatives(ignore_case or opening[0] == "(?i:")
        self._close()
        return _Item(
            any(all(item.nullable for item in items) for items in alternatives),
            frozenset().union(*(_reachable(items) for items in alternatives)),
            frozenset().union(*(_reachable(items[::-1], last=True) for items in alternatives)),
            possessive=True,
        )

    def _close(self) -> None:
        if self._peek() != ")":
            raise NotExactError("pattern with a group that is not understood")
        self._at += 1

    def _parse_class(self) -> str:
        start = self._at
        depth = 0
        if self._source.startswith(("[]", "[^]"), start):
            raise NotExactError("pattern with a class that begins with a bracket")
        while self._at < len(self._source):
            char = self._source[self._at]
            self._at += 2 if char == "\\" else 1
            depth += {"[": 1, "]": -1}.get(char, 0)
            if depth == 0:
                return self._source[start : self._at]
        raise NotExactError("pattern with a class that does not end")

    def _parse_escape(self) -> str:
        escape = _ESCAPE.match(self._source, self._at)
        if escape is None:
            raise NotExactError(f"pattern with {self._source[self._at : self._at + 4]!r}")
        self._at = escape.end()
        return escape[0]


def _reachable(items: list[_Item], last: bool = False) -> frozenset[int]:
    """The first (or, of reversed items, last) positions of a sequence."""
    found: frozenset[int] = frozenset()
    for item in items:
        found |= item.last if last else item.first
        if not item.nullable:
            break
    return found
