"""Chat with any causal model of transformers; what was said once is not computed again.

    python examples/chat.py Qwen/Qwen3-0.6B --store redis://127.0.0.1:6379/0
    python examples/chat.py tiny --store file:///tmp/tierkv    # random weights, no download

Start it again, or on another machine with the same store: the conversation is found there.
"""

import argparse
from contextlib import suppress

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(
        f"error: {error}: run pip install -e '.[transformers]' in the checkout"
    ) from None

from tierkv.adapters.transformers import TierKVCache
from tierkv.sched.worth import FetchPolicy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", help="a name or a path, or 'tiny' for one with random weights")
parser.add_argument("--store", help="a URL of docs/storage.md; without one, host memory alone")
parser.add_argument("--max-new-tokens", type=int, default=200)
chosen = parser.parse_args()

if chosen.model == "tiny":  # its tokens are bytes
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=8, **sizes)).eval()
    tokenizer, policy = None, FetchPolicy.WAIT_COMPLETE  # though it would be computed faster
else:
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype="auto", device_map="auto")
    tokenizer, policy = AutoTokenizer.from_pretrained(chosen.model), FetchPolicy.BEST_EFFORT

messages: list[dict[str, str]] = []
with (
    suppress(EOFError, KeyboardInterrupt),  # Ctrl-D and Ctrl-C end it
    TierKVCache.for_model(model, chosen.store, fetch_policy=policy) as cache,
):
    while said := input("you> "):
        messages.append({"role": "user", "content": said})
        if tokenizer is None:
            ids = torch.tensor([list("\n".join(one["content"] for one in messages).encode())])
        else:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"].to(model.device)
        answer = model.generate(
            ids, past_key_values=cache, max_new_tokens=chosen.max_new_tokens, do_sample=False
        )[0, ids.shape[1] :].tolist()
        text = (
            bytes(answer).decode("ascii", "replace")
            if tokenizer is None
            else tokenizer.decode(answer)
        )
        messages.append({"role": "assistant", "content": text})
        print(f"{text}\n[{cache.last_hit}]")
