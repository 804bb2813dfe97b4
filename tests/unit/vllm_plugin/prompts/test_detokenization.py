"""A detokenizer that starts from the end of its prompt returns the text of one that got it all."""

from random import Random

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from tests.support import decoding
from tests.support import shared_prefixes as cases
from tests.support import tokenizers as families
from vllm_prefixshare.vllm_plugin.prompts import detokenization, known_code, parts

TEXT = "The quick brown fox jumps over the lazy dog, and 12345 other things happen. " * 20


@pytest.fixture(autouse=True, scope="module")
def hooks_are_installed():
    cases.install()


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    found = parts.PartCounters()
    monkeypatch.setattr(parts, "COUNTERS", {"detokenization": found})
    return found


@pytest.mark.parametrize("name", decoding.KINDS)
def test_random_prompts_and_outputs(name):
    decoding.compare(Random(name), decoding.backend(name), cases=60)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", decoding.KINDS)
def test_a_long_prompt_starts_from_its_tail(counters, name, skip_special_tokens):
    tokenizer = decoding.backend(name)
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    outputs = tokenizer.encode(" Then it ends.", add_special_tokens=False).ids
    decoding.assert_same_texts(tokenizer, prompt, outputs, skip_special_tokens)
    assert (counters.requests, counters.fallbacks) == (1, 0)
    assert counters.units == len(prompt)
    assert counters.shared_units >= len(prompt) - 64


@pytest.mark.parametrize("name", decoding.BYTES)
@pytest.mark.parametrize(
    "character", ["\N{ROCKET}", "\N{LINEAR B SYLLABLE B008 A}", "\N{HANGUL SYLLABLE HIH}"]
)
def test_a_prompt_that_ends_inside_a_character_is_not_repeated(name, character):
    """The first output of vLLM is the whole prompt (vLLM #48853)."""
    tokenizer = decoding.backend(name)
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    inside = tokenizer.encode("a" + character, add_special_tokens=False).ids
    text = character + " and more"
    after = tokenizer.encode("a" + text, add_special_tokens=False).ids
    ends = [
        end for end in range(1, len(inside)) if tokenizer.decode(inside[:end]).endswith("\ufffd")
    ]
    assert ends, "the character has several tokens"
    for length in (0, 3, len(prompt)):
        for end in ends:
            ids = prompt[:length] + inside[:end]
            with cases.active():
                theirs = decoding.texts(tokenizer, ids, after[end:])
            with cases.active("detokenization"):
                ours = decoding.texts(tokenizer, ids, after[end:])
            assert "".join(theirs).endswith("".join(ours)), "the end of what vLLM returns"
            assert len("".join(theirs)) > len("".join(ours))
            assert "".join(ours) == text
            assert [bool(t) for t in ours] == [bool(t) for t in theirs]


def test_stop_strings_see_the_same_text():
    tokenizer = decoding.backend("byte level")
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    outputs = tokenizer.encode(" One. Two. STOP. Three.", add_special_tokens=False).ids
    found = []
    for names in ((), ("detokenization",)):
        with cases.active(*names):
            for include in (True, False):
                params = SamplingParams(stop=["STOP."], include_stop_str_in_output=include)
                made = decoding.detokenizer(tokenizer, prompt, params)
                stops = [made.update([token], False) for token in outputs]
                found.append((stops, made.output_text))
    assert found[:2] == found[2:]
    assert "STOP." in found[0][0]


def test_special_tokens_at_the_end_and_spaces_between_them():
    tokenizer = decoding.backend("byte level")
    special = sorted(tokenizer.get_added_tokens_decoder())
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for count in (1, 7, 30, 80):
        ids = prompt + [special[i % len(special)] for i in range(count)]
        outputs = [special[0], special[1], *prompt[:4], special[0]]
        for skip in (True, False):
            decoding.assert_same_texts(tokenizer, ids, outputs, skip)
            decoding.assert_same_texts(tokenizer, ids, outputs, skip, between=False)


def test_the_request_keeps_its_prompt():
    tokenizer = decoding.backend("byte level")
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    request = decoding.request(prompt, SamplingParams())
    before = list(prompt)
    with cases.active("detokenization"):
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        FastIncrementalDetokenizer(wrapped, request)
    assert request.prompt_token_ids is prompt
    assert prompt == before


@pytest.mark.parametrize("prompt", [None, [], [5], [5, 6, 7]])
def test_short_prompts_and_embeddings(prompt):
    tokenizer = decoding.backend("byte level")
    decoding.assert_same_texts(tokenizer, prompt, [10, 11, 12], True)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Strip(" ", 2, 0),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
        decoders.Replace(Regex("a+"), "b"),
    ],
)
def test_decoders_that_look_across_tokens_get_the_whole_prompt(monkeypatch, counters, decoder):
    messages: list[str] = []
    monkeypatch.setattr(detokenization, "report_once", lambda part, why: messages.append(why))
    tokenizer = Tokenizer.from_str(decoding.backend("byte level").to_str())
    tokenizer.decoder = decoder
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for _ in range(2):
        decoding.assert_same_texts(tokenizer, prompt, prompt[:5], True)
    assert (counters.requests, counters.fallbacks) == (2, 2)
    assert len(messages) == 1
    assert "decoder" in messages[0]


def test_an_unreadable_backend_gets_the_whole_prompt(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(detokenization, "report_once", lambda part, why: messages.append(why))
    assert detokenization._find_start(object(), list(range(100)), True) is None
    assert "cannot be read" in messages[0]


def test_a_prompt_without_a_safe_tail_is_given_whole(counters):
    tokenizer = decoding.backend("byte level")
    special = sorted(tokenizer.get_added_tokens_decoder())
    decoding.assert_same_texts(tokenizer, special * 50, [10, 11], False)
    assert counters.fallbacks == 1


def test_this_release_is_known():
    assert known_code.is_known("detokenization", detokenization.KNOWN_CODE)


def test_another_vllm_starts_with_the_whole_prompt(monkeypatch, counters):
    monkeypatch.setattr(detokenization, "KNOWN_CODE", {"vllm.v1.engine.detokenizer.Gone": ()})
    messages: list[str] = []
    monkeypatch.setattr(known_code, "report_once", lambda part, reason: messages.append(reason))
    detokenization._is_supported.cache_clear()
    tokenizer = decoding.backend("byte level")
    decoding.assert_same_texts(tokenizer, list(range(100, 300)), [10, 11], True)
    assert counters.requests == 0
    assert len(messages) == 1
    detokenization._is_supported.cache_clear()


def beams_of(rnd, tokenizer, prompts, width):
    """Random ends of the ids of texts, some of which have a part of them in common."""
    size = tokenizer.get_vocab_size()
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        for _ in range(width):
            yield ids + [rnd.randrange(size) for _ in range(rnd.randrange(1, 12))]
        ids += [rnd.randrange(size) for _ in range(8)]
        for _ in range(width):
            yield ids + [rnd.randrange(size) for _ in range(rnd.randrange(1, 4))]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", decoding.KINDS)
def test_beams_take_the_text_of_their_prompt_from_the_first(counters, name, skip_special_tokens):
    rnd = Random(name)
    backend = decoding.backend(name)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False
    )
    decoder = detokenization.CommonPrefixDecoder(tokenizer)
    prompts = [TEXT, families.random_text(rnd, 40), TEXT[:-1] + "\N{ROCKET}", "x", TEXT]
    options = {"skip_special_tokens": skip_special_tokens}
    for ids in beams_of(rnd, backend, prompts, width=6):
        assert decoder.decode(ids, **options) == tokenizer.decode(ids, **options)
    length = len(backend.encode(TEXT, add_special_tokens=False).ids)
    assert counters.shared_units >= 3 * 11 * (length - 64)
    assert counters.fallbacks < counters.requests / 4


@pytest.mark.parametrize("change", ["clean-up", "decode"])
def test_a_tokenizer_that_changes_the_text_decodes_each_beam(counters, change):
    class Changing(transformers.PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    kind = Changing if change == "decode" else transformers.PreTrainedTokenizerFast
    backend = decoding.backend("WordPiece without clean-up")
    tokenizer = kind(tokenizer_object=backend, clean_up_tokenization_spaces=change == "clean-up")
    decoder = detokenization.CommonPrefixDecoder(tokenizer)
    for ids in beams_of(Random(0), backend, [TEXT], width=4):
        assert decoder.decode(ids) == tokenizer.decode(ids)
    assert counters.fallbacks == counters.requests == 8
