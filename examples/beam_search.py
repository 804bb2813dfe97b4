"""Wide beam search over a document, with vLLM's own ``LLM.beam_search``.

vLLM runs a step of beam search as one new request of one output token for each beam. The full KV
blocks of a beam come from the prefix cache, and the tokens after them are computed again as a
prompt, for which vLLM's own attention is used. So a step decodes, and can share, only where all but
the last token of a beam
fill whole blocks: one step in ``--block-size``. The table shows the saving in these steps. Many
samples of one prompt (majority_vote.py) decode, and share, at every step.

    python examples/beam_search.py
    python examples/beam_search.py --model MODEL --width 32 --max-tokens 64 --block-size 16
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import common  # in this folder

DOCUMENT = Path(__file__).resolve().parent / "document.md"


class Beam(NamedTuple):
    """The output of a beam, without the prompt. score: log-probability of the beam."""

    token_ids: tuple[int, ...]
    text: str
    score: float


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Beam], list[Beam]]:
    """Search; return the beams, the best first."""
    from vllm.sampling_params import BeamSearchParams

    tokenizer = llm.get_tokenizer()
    text = DOCUMENT.read_text(encoding="utf-8")
    # after two more tokens, a beam has whole blocks and one token: a step that can share
    prompt = tokenizer.encode(text)[: args.prompt_tokens // args.block_size * args.block_size - 1]
    found = llm.beam_search(
        [{"prompt_token_ids": prompt}],
        BeamSearchParams(beam_width=args.width, max_tokens=args.max_tokens, ignore_eos=True),
    )
    beams = []
    for sequence in found[0].sequences:
        tokens = tuple(sequence.tokens[len(prompt) :])
        beams.append(Beam(tokens, tokenizer.decode(tokens), sequence.cum_logprob))
    return beams, beams


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=4096, block_size=32, pairs=3)
    parser.add_argument("--width", type=int, default=8, help="number of beams")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the document")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of a beam")
    args = parser.parse_args()
    common.at_least(args, 1, "width", "max_tokens")
    common.check_options(args)
    common.at_least(args, args.block_size, "prompt_tokens")
    args.max_num_seqs, args.max_logprobs = args.width, 2 * args.width
    found = common.compare(args, work)
    print()
    for beam in found.first[common.OURS].shown[:4]:
        print(f"{beam.score:8.2f}  {' '.join(beam.text.split())}")
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
