"""Workloads: calls of ``vllm.LLM`` as a user makes them.

All prompts are fixed in advance, assistant messages of conversations included, so that every row
gets the same prompts whatever its model answers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from benchmarks.whole_call.texts import Document, Tokenize, asked, question, shuffled

Prompts = Sequence[str] | Sequence[list[int]] | Sequence[list[dict[str, str]]]

#: Sizes at --scale 1.
NUM_QUESTIONS, NUM_MANY_QUESTIONS = 64, 256
NUM_DOCUMENTS, QUESTIONS_PER_DOCUMENT = 4, 32
NUM_CONVERSATIONS, NUM_TURNS = 16, 4
NUM_AGENTS, NUM_STEPS, NUM_TOOLS = 16, 4, 48
#: beam width -> number of prompts
BEAMS, BEAM_CONTEXT = {4: 4, 16: 4, 64: 1}, 4096
#: Prompts that share nothing all need their own KV cache, so that they are shorter.
NUM_UNSHARED, UNSHARED_CONTEXT = 32, 4096


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``LLM.generate``, ``LLM.chat`` or ``LLM.beam_search``.

    prompts: texts or token ids; conversations for chat.
    max_tokens: number of output tokens of each answer.
    """

    kind: Literal["generate", "chat", "beams"]
    prompts: Prompts
    max_tokens: int
    beam_width: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of a workload.

    timed: calls that are timed, one after the other.
    warm_up: calls before them that are not timed.
    reset: whether the prefix cache is emptied first.
    """

    timed: tuple[Call, ...]
    warm_up: tuple[Call, ...] = ()
    reset: bool = False


class Workloads:
    """All workloads on some documents.

    Args:
        documents: whole documents; further ones are made by shuffling the words of these.
        tokenize: token ids of a text.
        tokens: number of output tokens of an answer.
        scale: factor for the number of requests.
    """

    def __init__(
        self, documents: Sequence[Document], tokenize: Tokenize, tokens: int, scale: float = 1.0
    ) -> None:
        self._texts = [document.text for document in documents]
        self._characters_per_token = len(documents[0].text) / documents[0].num_tokens
        self._tokenize, self._tokens, self._scale = tokenize, tokens, scale
        self._made: dict[tuple[str, int], Run] = {}

    def run(self, name: str, repeat: int) -> Run:
        """The measurement number ``repeat`` of a workload, with questions that no other has."""
        key = name, repeat
        if key not in self._made:
            self._made[key] = WORKLOADS[name].make(self, repeat)
        return self._made[key]

    def count(self, number: int) -> int:
        """The number of requests, scaled."""
        return max(2, round(number * self._scale))

    def document(self, number: int) -> str:
        known = len(self._texts)
        text = self._texts[number % known]
        return text if number < known else shuffled(text, number)

    def start(self, text: str, num_tokens: int) -> str:
        """About ``num_tokens`` tokens from the start of a text."""
        return text[: round(num_tokens * self._characters_per_token)]

    def cold(self, repeat: int) -> Run:
        # a document that nothing has seen, be it a prefix cache or a cache of texts
        text = shuffled(self._texts[0], 1000 + repeat)
        prompts = [asked(text, repeat, i) for i in range(self.count(NUM_QUESTIONS))]
        return Run((Call("generate", prompts, self._tokens),), reset=True)

    def cached(self, repeat: int) -> Run:
        return self._questions(1, self.count(NUM_QUESTIONS), self._tokens, 100 + repeat)

    def cached_1token(self, repeat: int) -> Run:
        return self._questions(1, self.count(NUM_QUESTIONS), 1, 200 + repeat)

    def cached256(self, repeat: int) -> Run:
        return self._questions(1, self.count(NUM_MANY_QUESTIONS), self._tokens, 300 + repeat)

    def documents4x32(self, repeat: int) -> Run:
        each = self.count(QUESTIONS_PER_DOCUMENT)
        return self._questions(NUM_DOCUMENTS, each, self._tokens, 400 + repeat)

    def token_ids(self, repeat: int) -> Run:
        run = self._questions(1, self.count(NUM_QUESTIONS), self._tokens, 500 + repeat)
        texts: Sequence[Any] = run.timed[0].prompts
        ids = [self._tokenize(text) for text in texts]
        return Run((Call("generate", ids, self._tokens),), run.warm_up)

    def _questions(self, num_documents: int, each: int, tokens: int, seed: int) -> Run:
        """Questions on cached documents, document after document."""
        texts = [self.document(i) for i in range(num_documents)]
        warm = [asked(text, seed, each) for text in texts]
        prompts = [asked(text, seed, i) for text in texts for i in range(each)]
        return Run((Call("generate", prompts, tokens),), (Call("generate", warm, 1),))

    def chat(self, repeat: int) -> Run:
        def conversation(number: int) -> list[dict[str, str]]:
            text = self.document(0)
            return [
                message("system", f"Answer from this document.\n\n{text}"),
                message("user", question(text, 600 + repeat, number)),
            ]

        count = self.count(NUM_QUESTIONS)
        prompts = [conversation(i) for i in range(count)]
        warm_up = Call("chat", [conversation(count)], 1)
        return Run((Call("chat", prompts, self._tokens),), (warm_up,))

    def multi_turn(self, repeat: int) -> Run:
        text, count = self.document(0), self.count(NUM_CONVERSATIONS)
        begin = message("system", f"Answer from this document.\n\n{text}")
        talks = [[begin] for _ in range(count)]
        warm_up = Call("chat", [[begin, message("user", "Hello.")]], 1)
        calls = []
        for turn in range(NUM_TURNS):
            for i, talk in enumerate(talks):
                if turn:
                    talk.append(message("assistant", self._passage(repeat, i, turn)))
                number = i * NUM_TURNS + turn
                talk.append(message("user", question(text, 700 + repeat, number)))
            calls.append(Call("chat", [list(talk) for talk in talks], self._tokens))
        return Run(tuple(calls), (warm_up,))

    def agents(self, repeat: int) -> Run:
        text, count = self.document(0), self.count(NUM_AGENTS)
        handbook = f"You are an agent. Your tools:\n{tools()}\n\nThe handbook:\n\n{text}"
        begin = message("system", handbook)
        talks = [[begin, message("user", question(text, 800 + repeat, i))] for i in range(count)]
        warm_up = Call("chat", [[begin, message("user", "Hello.")]], 1)
        calls = []
        for step in range(NUM_STEPS):
            if step:
                for i, talk in enumerate(talks):
                    used = {"tool": f"tool_{(i + step) % NUM_TOOLS}", "arguments": {"line": step}}
                    talk.append(message("assistant", json.dumps(used)))
                    talk.append(message("user", f"Result: {self._passage(repeat, i, step)}"))
            calls.append(Call("chat", [list(talk) for talk in talks], self._tokens))
        return Run(tuple(calls), (warm_up,))

    def _passage(self, repeat: int, request: int, turn: int) -> str:
        """About 100 tokens of the document, as an answer or the result of a tool."""
        text = self._texts[0]
        at = (repeat * 7919 + request * 977 + turn * 131) % max(1, len(text) - 400)
        return text[at : at + 400].strip()

    def beams(self, repeat: int, width: int) -> Run:
        text = self.start(self.document(0), BEAM_CONTEXT)
        count = self.count(BEAMS[width])
        seed = 900 + 10 * width + repeat
        warm_up = Call("generate", [asked(text, seed, count)], 1)
        prompts = [asked(text, seed, i) for i in range(count)]
        return Run((Call("beams", prompts, self._tokens, width),), (warm_up,))

    def unshared(self, repeat: int) -> Run:
        count = self.count(NUM_UNSHARED)
        first = 10_000 + repeat * count
        start = self.start(self._texts[0], UNSHARED_CONTEXT)
        # the number comes first, so that not even the first block is shared
        prompts = [
            f"{first + i}. " + asked(shuffled(start, first + i), 1300 + repeat, i)
            for i in range(count)
        ]
        return Run((Call("generate", prompts, self._tokens),), reset=True)

    def host(self, repeat: int) -> Run:
        """As ``cached``; few output tokens, since the host's work is for prompts."""
        return self._questions(1, self.count(NUM_QUESTIONS), 2, 1400 + repeat)

    def host_unshared(self, repeat: int) -> Run:
        run = self.unshared(100 + repeat)
        return Run((Call("generate", run.timed[0].prompts, 2),), reset=True)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def tools() -> str:
    """Descriptions of tools, one JSON object per line."""
    verbs = ("read", "find", "count", "list", "compare", "translate", "plot", "verify")
    described = [
        {
            "name": f"tool_{i}",
            "description": f"{verbs[i % len(verbs)].capitalize()} lines of section {i}.",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "pattern": {"type": "string"}},
                "required": ["line"],
            },
        }
        for i in range(NUM_TOOLS)
    ]
    return "\n".join(json.dumps(tool) for tool in described)


class Kind(NamedTuple):
    """A workload by name.

    make: its measurement number ``repeat``.
    title: heading, with a place for the number of requests.
    number: number of requests at scale 1, as the title counts them.
    """

    make: Callable[[Workloads, int], Run]
    title: str
    number: int


#: Measured in one engine of a row.
OFFLINE: dict[str, Kind] = {
    "cold": Kind(Workloads.cold, "{} questions on one document, cold", NUM_QUESTIONS),
    "cached": Kind(Workloads.cached, "{} questions, document cached", NUM_QUESTIONS),
    "cached_1token": Kind(
        Workloads.cached_1token, "{} questions, document cached, 1 output token", NUM_QUESTIONS
    ),
    "cached256": Kind(Workloads.cached256, "{} questions, document cached", NUM_MANY_QUESTIONS),
    "documents4x32": Kind(
        Workloads.documents4x32,
        f"{NUM_DOCUMENTS} documents x {{}} questions, cached",
        QUESTIONS_PER_DOCUMENT,
    ),
    "token_ids": Kind(
        Workloads.token_ids, "{} questions as token ids, document cached", NUM_QUESTIONS
    ),
    "chat": Kind(Workloads.chat, "`LLM.chat`, {} questions, document cached", NUM_QUESTIONS),
    "multi_turn": Kind(
        Workloads.multi_turn,
        f"`LLM.chat`, {{}} conversations x {NUM_TURNS} turns",
        NUM_CONVERSATIONS,
    ),
    "agents": Kind(Workloads.agents, f"`LLM.chat`, {{}} agents x {NUM_STEPS} steps", NUM_AGENTS),
    **{
        f"beams{width}": Kind(
            partial(Workloads.beams, width=width),
            f"`LLM.beam_search`, {{}} prompt{'s' * (number > 1)}, {width} beams",
            number,
        )
        for width, number in BEAMS.items()
    },
    "unshared": Kind(Workloads.unshared, "{} prompts that share nothing", NUM_UNSHARED),
}
#: Measured in an engine that has one process.
HOST: dict[str, Kind] = {
    "host": Kind(
        Workloads.host, "host time per request, {} questions, document cached", NUM_QUESTIONS
    ),
    "host_unshared": Kind(
        Workloads.host_unshared,
        "host time per request, {} prompts that share nothing",
        NUM_UNSHARED,
    ),
}
WORKLOADS = {**OFFLINE, **HOST}
SERVER = "server"
