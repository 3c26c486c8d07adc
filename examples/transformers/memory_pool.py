"""The plain script, with tensors from memory that is used again."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import retime  # retime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--samples", type=int, default=500)
    options = parser.parse_args()

    torch.manual_seed(0)
    with open(argparse.__file__, "rb") as file:
        tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)[: options.samples]
    data = [{"input_ids": row, "labels": row} for row in rows]
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, **special))
    arguments = TrainingArguments(
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    with retime.CPUMemoryPool() as pool:  # retime
        output = trainer.train()
    print(pool.report())  # retime
    print(f"loss {output.training_loss:.4f}")


if __name__ == "__main__":
    main()
