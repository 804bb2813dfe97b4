"""Random texts tokenized by pieces: exactly the tokenizer's ids, for every kind of tokenizer."""

from random import Random

import pytest

from tests.support import fuzz_scale as scale
from tests.support import tokenizers
from vllm_prefixshare.vllm_plugin.prompts import tokenization
from vllm_prefixshare.vllm_plugin.prompts.bounded_cache import BoundedCache
from vllm_prefixshare.vllm_plugin.prompts.tokenization import TextTokenizer

#: (windows, pieces, last pieces) in characters: small ones cut a short text often.
SIZES = (((64,), 12, 4), ((256, 48), 16, 2), ((2048, 512), 64, 8), ((32768, 2048), 512, 64))
TEXTS_PER_DOCUMENT = 4


@pytest.mark.parametrize("kind", tokenizers.EXACT)
def test_texts_by_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers.EXACT[kind]()
    memo = TextTokenizer(tokenizer, BoundedCache(1 << 22))
    rnd = Random(scale.seed_of("texts", kind))
    documents = -(-scale.TEXTS // (len(tokenizers.EXACT) * TEXTS_PER_DOCUMENT))
    chars = 0
    for number in range(documents):
        windows, piece, last = rnd.choice(SIZES)
        monkeypatch.setattr(tokenization, "WINDOW_CHARS", windows)
        monkeypatch.setattr(tokenization, "PIECE_CHARS", piece)
        monkeypatch.setattr(tokenization, "LAST_PIECE_CHARS", last)
        document = tokenizers.random_text(rnd, rnd.choice((6, 20, 60)))
        for _ in range(TEXTS_PER_DOCUMENT):
            start, end = sorted(rnd.choices(range(len(document) + 1), k=2))
            text = document[:start] + tokenizers.random_text(rnd, 8) + document[end:]
            special = rnd.random() < 0.5
            token_ids, _ = memo.encode(text, special)
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert token_ids == expected, (kind, text)
            assert token_ids.array.tolist() == expected, (kind, text)
            chars += len(text)
        if number % 1000 == 999:
            scale.progress(f"texts {kind} {number + 1}")
    scale.report(f"{documents * TEXTS_PER_DOCUMENT} texts, {chars} characters: {kind}")
