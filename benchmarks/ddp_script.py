"""The smallest DDP training script, for bench_start: torchrun --nproc-per-node 2 benchmarks/ddp_script.py

A Transformer of the sizes of dtengine's default model, on random bytes; it imports torch alone.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HEADS, VOCAB, SEQ, GLOBAL_BATCH = 2, 128, 4, 256, 128, 32
STEPS = 300


def main() -> None:
    """Train, and print the loss of each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, WIDTH), blocks, nn.Linear(WIDTH, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH // dist.get_world_size(), SEQ + 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
