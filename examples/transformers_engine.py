"""transformers' continuous batching as an engine whose weights and paged cache sleep between two calls.

transformers allocates the cache at the first call and captures CUDA graphs that use it. Both stay valid, because a sleep
keeps the addresses. The program needs `pip install transformers`. The model is small, and has random weights.

    python examples/transformers_engine.py
"""

import torch
from _common import GIB, check, check_bytes, free_bytes, options, show
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin, Qwen2Config, Qwen2ForCausalLM
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from torch_memory_saver import torch_memory_saver

#: Two prompts begin with the same block of tokens, which requests can share.
BLOCK, PROMPTS, ANSWER = 32, [list(range(1, 81)), list(range(1, 41)), [7, 8, 9]], 8
MODEL = Qwen2Config(
    vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)

#: The keys and values of a token in all layers, in 32 bits.
TOKEN_BYTES = MODEL.num_hidden_layers * 2 * MODEL.hidden_size * 4

# The cache's tensors are allocated in its constructor, whichever thread calls that.
PagedAttentionCache.__init__ = torch_memory_saver.region(tag="kv_cache")(PagedAttentionCache.__init__)


class Engine:
    """A model that answers prompts with continuous batching, and sleeps in between."""

    def __init__(self, cache_bytes: int) -> None:
        with torch_memory_saver.region(tag="weights", backup="host"):
            self.model = Qwen2ForCausalLM(MODEL).to("cuda")
        self.model.set_attn_implementation("paged|sdpa")
        self.generation = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1)
        self.batching = ContinuousBatchingConfig(
            block_size=BLOCK,
            num_blocks=cache_bytes // (BLOCK * TOKEN_BYTES) - 2,  # there are two more for padding
            max_batch_tokens=64,
            max_requests_per_batch=4,
            use_cuda_graph=True,
        )

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the engine's answer to each prompt. The first call makes the manager with its cache and graphs."""
        answers = self.model.generate_batch(prompts, self.generation, self.batching, persistent_manager=True)
        return [answer.generated_tokens for answer in answers.values()]

    def sleep(self) -> None:
        torch_memory_saver.pause(["weights", "kv_cache"])

    def wake_up(self) -> None:
        torch_memory_saver.resume(["weights", "kv_cache"])
        renew(self.model)


def renew(model: GenerationMixin) -> None:
    """Prepare the cache of a model for use, as its constructor does, after a pause has dropped its contents."""
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    for tensor in (*cache.key_cache, *cache.value_cache):
        tensor[cache.read_trash_index : cache.write_trash_index] = 0  # padding reads this block
    # Requesting all blocks makes the cache forget which prompts they hold, so that no later request uses lost contents.
    check(cache._block_manager.has_enough_free_blocks(cache.num_blocks), "no request uses the cache")


def nap(engine: Engine) -> None:
    """Let the engine sleep once. Meanwhile a trainer takes half of the released memory and overwrites it."""
    held, before = torch_memory_saver.stats().total.resident_bytes, free_bytes()
    show("the engine has its weights, cache and graphs")
    engine.sleep()
    show("the engine sleeps")
    if not torch_memory_saver.guard:  # guard mode keeps one page of 2 MiB
        check_bytes(free_bytes() - before, held, "given back by the engine")
    torch.full((held // 2,), 0xEE, dtype=torch.uint8, device="cuda").sum().item()
    torch.cuda.empty_cache()
    engine.wake_up()


def main() -> None:
    cache_bytes = int(options(__doc__, gib=0.125).parse_args().gib * GIB)
    torch.manual_seed(0)
    engine = Engine(cache_bytes)
    expected = engine.answer(PROMPTS)
    cached = torch_memory_saver.stats("kv_cache").total.resident_bytes
    check_bytes(cached, cache_bytes, "in the managed cache")
    for guard in (False, True):
        torch_memory_saver.guard = guard  # guard mode fills memory that lost its contents with NaN
        nap(engine)
        check(engine.answer(PROMPTS) == expected, f"the answers are the same after a sleep, {guard=}")


if __name__ == "__main__":
    main()
