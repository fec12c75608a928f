# SPDX-License-Identifier: Apache-2.0
"""Plain training scripts, and what a process has resident while it runs one.

    python tests/resident_programs.py gpt none  # eager: its losses and the bytes that it takes
    python tests/resident_programs.py gpt memory_limit 60000000
    sh -c "ulimit -d 400000; python tests/resident_programs.py gpt process"

Prints one line of JSON. Another process samples the resident anonymous memory (RssAnon) meanwhile:
what a thread of its own would miss while Python code holds the interpreter's lock.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiled import bytes_over_time

SAMPLER = """
import os, select, sys
file = os.open(f"/proc/{sys.argv[1]}/status", os.O_RDONLY)
def rss():
    text = os.pread(file, 4096, 0)
    if b"RssAnon:" not in text:
        sys.exit()
    return int(text[text.index(b"RssAnon:") + 8:].split(None, 1)[0]) * 1024
before = most = rss()
print(before, flush=True)
while True:
    most = max(most, rss())
    if select.select([0], [], [], 0.0005)[0]:
        if not sys.stdin.readline():
            break
        print(most - before, flush=True)
        most = rss()
"""


class Sampler:
    """The most bytes that this process has resident beyond those at the sampler's start."""

    def __init__(self) -> None:
        words = [sys.executable, "-S", "-c", SAMPLER, str(os.getpid())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        self._ask()

    def _ask(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def peak(self) -> int:
        """Since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._ask()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# Programs ---------------------------------------------------------------------------------------

#: Gives a batch for each step, and takes it, lazy or not, through one step; yields its loss.
Lazy = Callable[..., Any]
Program = Callable[[Lazy], Iterator[Tensor]]
N_STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.n_heads, self.is_causal = n_heads, is_causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, width = x.shape
        shape = rows, length, 3, self.n_heads, width // self.n_heads
        q, k, v = self.qkv(self.first(x)).view(shape).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


def trained(
    lazy: Lazy, model: nn.Module, batch: Callable[[], Any], loss_of: Callable[..., Tensor]
) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(N_STEPS):
        given = lazy(*batch())
        optimizer.zero_grad()
        loss = loss_of(*given)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def gpt(lazy: Lazy) -> Iterator[Tensor]:
    """A language model with a head of many words."""
    width, length, n_words = 128, 64, 512
    words, places = nn.Embedding(n_words, width), nn.Embedding(length, width)
    blocks = nn.ModuleList(Block(width, 4, True) for _ in range(4))
    head = nn.Linear(width, n_words)
    model = nn.ModuleList([words, places, blocks, head])

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(n_words, (96, length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = words(x) + places(torch.arange(length))
        for block in blocks:
            h = block(h)
        return F.cross_entropy(head(h).flatten(0, 1), y.flatten())

    return trained(lazy, model, batch, loss_of)


def two_towers(lazy: Lazy) -> Iterator[Tensor]:
    """A contrastive loss of all rows against all rows."""

    def tower() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512),
            nn.GELU(), nn.Linear(512, 64),
        )  # fmt: skip

    first, second = tower(), tower()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(first(x), dim=1) @ F.normalize(second(y), dim=1).T * 10
        labels = torch.arange(len(x))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(2048, 64), torch.randn(2048, 64)

    return trained(lazy, nn.ModuleList([first, second]), batch, loss_of)


def bert(lazy: Lazy) -> Iterator[Tensor]:
    """An encoder of sentences with padding, dropout, and a class for each."""
    width, length, n_words = 128, 64, 1000
    words = nn.Embedding(n_words, width, padding_idx=0)
    layer = nn.TransformerEncoderLayer(width, 4, 512, 0.1, "gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    head = nn.Linear(width, 5)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, n_words, (64, length))
        ids[torch.arange(length) > torch.randint(8, length, (64, 1))] = 0
        return ids, torch.randint(5, (64,))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = encoder(words(x), src_key_padding_mask=x == 0)
        return F.cross_entropy(head(h[:, 0]), y)

    return trained(lazy, nn.ModuleList([words, encoder, head]), batch, loss_of)


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.skip = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def pictures(n_rows: int, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(n_rows, 3, size, size), torch.randint(10, (n_rows,))


def residual_net(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def resnet(lazy: Lazy) -> Iterator[Tensor]:
    """Convolutions with batch normalization and skips."""
    model = residual_net(24)
    return trained(lazy, model, lambda: pictures(128), lambda x, y: F.cross_entropy(model(x), y))


def mixed_up(lazy: Lazy) -> Iterator[Tensor]:
    """Blends of images in a narrow network: a chunk of few samples has small tensors."""
    model = residual_net(16)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        blend = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return F.cross_entropy(model(blend), y)

    return trained(lazy, model, lambda: pictures(384), loss_of)


def group_norm(lazy: Lazy) -> Iterator[Tensor]:
    """Convolutions without batch statistics."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(n_in, n_out, 3, 1, 1), nn.GroupNorm(4, n_out), nn.SiLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return trained(lazy, model, lambda: pictures(96), lambda x, y: F.cross_entropy(model(x), y))


def mlp(lazy: Lazy) -> Iterator[Tensor]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(8192, 256), torch.randint(10, (8192,))

    return trained(lazy, model, batch, lambda x, y: F.cross_entropy(model(x), y))


def recurrent(lazy: Lazy, is_packed: bool) -> Iterator[Tensor]:
    layer, head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)
    lengths = torch.arange(128) % 96 + 1

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        if not is_packed:
            return F.cross_entropy(head(layer(x)[0].mean(1)), y)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return F.cross_entropy(head(layer(packed)[1][0][-1]), y)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(128, 96, 64), torch.randint(10, (128,))

    return trained(lazy, nn.ModuleList([layer, head]), batch, loss_of)


def lstm(lazy: Lazy) -> Iterator[Tensor]:
    """Two recurrent layers over sequences of one length."""
    return recurrent(lazy, False)


def packed_lstm(lazy: Lazy) -> Iterator[Tensor]:
    """The same over sequences of many lengths, packed."""
    return recurrent(lazy, True)


def gru_tagger(lazy: Lazy) -> Iterator[Tensor]:
    """A class for each word, both ways."""
    words, layer = nn.Embedding(1000, 64), nn.GRU(64, 96, bidirectional=True, batch_first=True)
    head = nn.Linear(192, 40)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randint(1000, (128, 96)), torch.randint(40, (128, 96))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(layer(words(x))[0]).flatten(0, 1), y.flatten())

    return trained(lazy, nn.ModuleList([words, layer, head]), batch, loss_of)


def generator() -> nn.Module:
    """DCGAN's: transposed convolutions and batch norms make images of 3x32x32 from 32 numbers."""

    def up(n_in: int, n_out: int) -> list[nn.Module]:
        layer = nn.ConvTranspose2d(n_in, n_out, 4, 2, 1, bias=False)
        return [layer, nn.BatchNorm2d(n_out), nn.ReLU()]

    return nn.Sequential(
        nn.ConvTranspose2d(32, 128, 4, bias=False), nn.BatchNorm2d(128), nn.ReLU(), *up(128, 64),
        *up(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    """DCGAN's: strided convolutions and batch norms make a number of such an image."""

    def down(n_in: int, n_out: int) -> list[nn.Module]:
        layer = nn.Conv2d(n_in, n_out, 4, 2, 1, bias=False)
        return [layer, nn.BatchNorm2d(n_out), nn.LeakyReLU(0.2)]

    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), *down(32, 64), *down(64, 128),
        nn.Conv2d(128, 1, 4), nn.Flatten(0),
    )  # fmt: skip


def dcgan(lazy: Lazy) -> Iterator[Tensor]:
    """Two networks, each with its optimizer, and outputs that are held from step to step."""
    maker, judge = generator(), discriminator()
    optimizers = [torch.optim.Adam(net.parameters(), 1e-4) for net in (judge, maker)]
    for _ in range(N_STEPS):
        real, noise = lazy(pictures(640)[0], torch.randn(640, 32, 1, 1))
        judge.zero_grad()
        out = judge(real)
        loss_real = F.binary_cross_entropy_with_logits(out, torch.ones_like(out))
        loss_real.backward()
        fake = maker(noise)
        out = judge(fake.detach())
        loss_fake = F.binary_cross_entropy_with_logits(out, torch.zeros_like(out))
        loss_fake.backward()
        optimizers[0].step()
        maker.zero_grad()
        out = judge(fake)
        loss = F.binary_cross_entropy_with_logits(out, torch.ones_like(out))
        loss.backward()
        optimizers[1].step()
        yield loss.detach() + loss_real.detach() + loss_fake.detach()


def vae(lazy: Lazy) -> Iterator[Tensor]:
    """A convolutional autoencoder whose code is drawn."""
    encoder = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    mean, spread = nn.Linear(4096, 32), nn.Linear(4096, 32)
    decoder = nn.Sequential(
        nn.Linear(32, 4096), nn.Unflatten(1, (64, 8, 8)), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1),
    )  # fmt: skip

    def loss_of(x: Tensor) -> Tensor:
        h = encoder(x)
        mu, log = mean(h), spread(h)
        code = mu + torch.randn_like(mu) * (0.5 * log).exp()
        again = F.mse_loss(decoder(code), x, reduction="sum")
        return again - 0.5 * (1 + log - mu.pow(2) - log.exp()).sum()

    model = nn.ModuleList([encoder, mean, spread, decoder])
    return trained(
        lambda x: (lazy(x),), model, lambda: (pictures(512)[0],), lambda x: loss_of(x) / 512
    )


def unet(lazy: Lazy) -> Iterator[Tensor]:
    """Convolutions down and up, with what was there joined on."""

    def pair(n_in: int, n_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, 1, 1), nn.ReLU(), nn.Conv2d(n_out, n_out, 3, 1, 1), nn.ReLU()
        )

    first, second, third, head = pair(3, 16), pair(16, 32), pair(48, 16), nn.Conv2d(16, 4, 1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = first(x)
        low = F.interpolate(second(F.max_pool2d(h, 2)), scale_factor=2, mode="bilinear")
        return F.cross_entropy(head(third(torch.cat([h, low], 1))), y)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(32, 3, 64, 64), torch.randint(4, (32, 64, 64))

    return trained(lazy, nn.ModuleList([first, second, third, head]), batch, loss_of)


PROGRAMS: dict[str, Program] = {
    made.__name__: made
    for made in (
        gpt,
        two_towers,
        bert,
        resnet,
        mixed_up,
        group_norm,
        mlp,
        lstm,
        packed_lstm,
        gru_tagger,
        dcgan,
        vae,
        unet,
    )
}


# A process of its own -----------------------------------------------------------------------------


def warm_up() -> None:
    """What libraries and threads take once is there before anything is counted."""
    layer = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(108, 2))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()  # torch imports its compiler for the first optimizer
    optimizer.zero_grad()


def vm_data() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))


def bytes_and_losses(program: Program) -> dict[str, Any]:
    """The most bytes that torch's allocator has handed out at one time, and eager's losses."""
    steps = program(lambda *given: given if len(given) > 1 else given[0])
    losses: list[float] = []
    most = max(bytes_over_time(lambda: losses.extend(map(float, steps))))
    return {"tensors": most, "losses": losses}


def run(name: str, kind: str, n_bytes: int) -> dict[str, Any]:
    """Train a program under a limit.

    Args:
        name: of the program.
        kind: "none": without a limit, in eager; "memory_limit": of koila; "process": under the one
            that the process has had from its start.
        n_bytes: of a memory_limit, beyond what is there before the program is made.
    """
    import koila

    torch.manual_seed(0)
    warm_up()
    found: dict[str, Any] = {"chunks": [], "reports": [], "losses": [], "warnings": []}
    told = logging.Handler()
    told.emit = lambda record: found["warnings"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("koila").addHandler(told)
    if kind == "none":
        there = vm_data()  # what a limit of the process counts
        return {"there": there, **bytes_and_losses(PROGRAMS[name])}
    sampler = Sampler()
    if kind == "memory_limit":
        koila.config(memory_limit=koila.memory.budget.taken(torch.device("cpu"), []) + n_bytes)
    peaks = []
    try:
        for loss in PROGRAMS[name](koila.lazy):
            found["losses"].append(float(loss))
            peaks.append(sampler.peak())
            for one in koila.report().programs:
                found["reports"].append(
                    [one.n_chunks, one.bytes_predicted, one.bytes_allowed, one.bytes_measured]
                )
            found["chunks"].append([one.n_chunks for one in koila.report().programs])
    except RuntimeError as error:
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        peaks.append(sampler.peak())
    found["peaks"] = peaks
    sampler.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0)))
