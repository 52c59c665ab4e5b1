"""TRL's GRPOTrainer with transformers' continuous batching: the cache sleeps while the trainer works, and the optimizer's
state sleeps while answers are generated.

The trainer is TRL's own. It calls generate_batch() of its model in every step, and the model pauses and resumes the memory
there. The model is small and has random weights, and answers with small numbers are rewarded. The program needs
`pip install transformers trl`, and one visible GPU.

    python examples/trl_grpo.py
"""

import argparse
import tempfile
from typing import Any

import torch
from _common import MIB, free_bytes
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers_engine import BLOCK, MODEL, TOKEN_BYTES, renew
from trl import GRPOConfig, GRPOTrainer

from torch_memory_saver import torch_memory_saver

ANSWERS, LENGTH, PROMPT = 4, 8, 40


class Policy(Qwen2ForCausalLM):
    """A model that is trained. Its cache has memory while it generates, and its optimizer has memory otherwise."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.used: list[tuple[int, int]] = []  # in each step, MiB of the device while it generates, and afterwards

    def generate_batch(self, *args: Any, **options: Any) -> Any:
        self.eval()
        first = not self.used  # there is no cache and no state of the optimizer yet
        if not first:
            torch_memory_saver.pause("optimizer")
            torch_memory_saver.resume("kv_cache")
            renew(self)
        answers = super().generate_batch(*args, **options, persistent_manager=True)
        generating = used_mib()
        torch_memory_saver.pause("kv_cache")
        if not first:
            torch_memory_saver.resume("optimizer")
        self.used.append((generating, used_mib()))
        return answers


def used_mib() -> int:
    """Return the memory of the device that is in use, MiB, without PyTorch's cached memory."""
    torch.cuda.empty_cache()
    return (torch.cuda.mem_get_info()[1] - free_bytes()) // MIB


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has a token for each number."""
    words = ["<pad>", "<end>", *map(str, range(MODEL.vocab_size - 2))]
    numbers = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    numbers.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token="<pad>", eos_token="<end>", padding_side="left")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [-float(sum(map(int, completion.split()))) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps of the trainer (default 3)")
    parser.add_argument("--kv-mib", type=int, default=64, help="size of the cache, MiB (default 64)")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Policy(MODEL).to("cuda")
    model.set_attn_implementation("eager")  # its gradients are the same in every run
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_memory_saver.manage(optimizer, tag="optimizer", backup="host")
    prompts = [" ".join(str(number * place % 200) for place in range(PROMPT)) for number in range(1, 5)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            max_steps=given.steps,
            per_device_train_batch_size=ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=LENGTH,
            bf16=False,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={
                "block_size": BLOCK,
                "num_blocks": given.kv_mib * MIB // (BLOCK * TOKEN_BYTES) - 2,
                "max_batch_tokens": 64,
                "max_requests_per_batch": ANSWERS,
                "use_cuda_graph": True,
            },
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        trainer = GRPOTrainer(model, reward, settings, data, processing_class=tokenizer(), optimizers=(optimizer, None))
        trainer.train()
    print("step           loss  norm of gradient     reward  MiB while generating  MiB in training")
    for row, (generating, training) in zip(trainer.state.log_history, model.used, strict=False):  # the last row is a summary
        numbers = f"{row['step']:4} {row['loss']:14.7e} {row['grad_norm']:17.7e} {row['reward']:10.3f}"
        print(f"{numbers} {generating:21} {training:16}")


if __name__ == "__main__":
    main()
