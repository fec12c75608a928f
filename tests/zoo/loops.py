# SPDX-License-Identifier: Apache-2.0
"""Training loops as their authors write them: libraries' trainers, optimizers that call a closure,
loops with several losses, and what is read on the way.

Each is called with a `Mode` and returns what must be equal, by name.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo import tiny
from zoo.entries import Entry, Loop, Mode

ROWS, MANY_ROWS, STEPS = 30, 1000, 3
#: Language models of transformers take their loss in float32, and the Trainer adds losses up in it.
LOGGED = 5e-7
#: Name: library, loop, and the relative difference that its own dtype allows.
LOOPS: dict[str, tuple[str, Loop, float]] = {}


def _loop(name: str, library: str, tolerance: float = 1e-9) -> Callable[[Loop], Loop]:
    def register(loop: Loop) -> Loop:
        LOOPS[name] = library, loop, tolerance
        return loop

    return register


def _numbers(*objects: Any, **named: Any) -> dict[str, Tensor]:
    """Parameters, gradients and buffers of modules, and what was logged."""
    made: dict[str, Tensor] = {}
    for i, module in enumerate(objects):
        made |= {
            f"{i}.{name}": value.detach().clone() for name, value in module.state_dict().items()
        }
    for name, values in named.items():
        made[name] = torch.tensor([float(value) for value in values], dtype=torch.float64)
    return made


def _language_model(mode: Mode, **settings: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = tiny.tiny(transformers.GPT2Config, n_embd=64, n_positions=64, **settings)
    return mode.prepare(transformers.GPT2LMHeadModel(config))


def _texts(rows: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(5, tiny.WORDS, (rows, 48))
    return [{"input_ids": row, "labels": row} for row in ids]


def _train(mode: Mode, model: Any, rows: int, **settings: Any) -> dict[str, Tensor]:
    import transformers

    def collate(features: list[Any]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = mode.lazy(transformers.default_data_collator(features))
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=rows,
            max_steps=STEPS,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
            **settings,
        )
        trainer = transformers.Trainer(
            model, arguments, data_collator=collate, train_dataset=_texts(ROWS * STEPS)
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return _numbers(model, losses=losses, norms=norms)


@_loop("trainer-accumulation", "transformers", tolerance=LOGGED)
def _trainer_accumulation(mode: Mode) -> dict[str, Tensor]:
    model = _language_model(mode)
    return _train(mode, model, ROWS // 2, gradient_accumulation_steps=2)


# bfloat16 has eight bits: sums over chunks are rounded elsewhere.
@_loop("trainer-bf16", "transformers", tolerance=2e-2)
def _trainer_bf16(mode: Mode) -> dict[str, Tensor]:
    return _train(mode, _language_model(mode), ROWS, bf16=True)


@_loop("trainer-checkpointing", "transformers", tolerance=LOGGED)
def _trainer_checkpointing(mode: Mode) -> dict[str, Tensor]:
    return _train(mode, _language_model(mode), ROWS, gradient_checkpointing=True)


@_loop("peft-lora", "peft", tolerance=LOGGED)
def _peft_lora(mode: Mode) -> dict[str, Tensor]:
    import peft

    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM"
    )
    model = mode.prepare(peft.get_peft_model(_language_model(mode), config))
    return _train(mode, model, ROWS)


@_loop("accelerate-accumulate", "accelerate", tolerance=LOGGED)
def _accelerate(mode: Mode) -> dict[str, Tensor]:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = _language_model(mode)
    data = DataLoader(_texts(ROWS * 4), batch_size=ROWS, shuffle=True)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for batch in data:
        batch = mode.lazy(batch)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return _numbers(accelerator.unwrap_model(model), losses=losses)


class _Pictures(nn.Module):
    """A small convolutional network with batch normalization."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def _pictures(mode: Mode, side: int = 24, rows: int = ROWS) -> DataLoader[Any]:
    n_rows = rows * STEPS
    data = TensorDataset(
        torch.randn(n_rows, 3, side, side, dtype=mode.dtype), torch.randint(10, (n_rows,))
    )
    return DataLoader(data, batch_size=rows)


def _lightning_trainer() -> Any:
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None,
    )


@_loop("lightning-automatic", "lightning")
def _lightning_automatic(mode: Mode) -> dict[str, Tensor]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Pictures()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = mode.lazy(batch)
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.log("loss", loss)
            self.log("accuracy", (logits.argmax(1) == y).float().mean())
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    module = mode.prepare(Module())
    _lightning_trainer().fit(module, _pictures(mode))
    return _numbers(module, losses=module.losses)


class _Generator(nn.Module):
    """Pictures from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.net(z)
        return out


def _discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(0),
    )


@_loop("lightning-manual", "lightning")
def _lightning_manual(mode: Mode) -> dict[str, Tensor]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = _Generator(), _discriminator()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, index: int) -> None:
            real, _ = mode.lazy(batch)
            first, second = self.optimizers()
            noise = torch.randn(real.shape[0], 16, 1, 1, dtype=real.dtype)
            fake = self.generator(noise)
            ones, zeros = torch.ones_like(fake[:, 0, 0, 0]), torch.zeros_like(fake[:, 0, 0, 0])
            loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            other = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
            other = other + F.binary_cross_entropy_with_logits(
                self.discriminator(fake.detach()), zeros
            )
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.log_dict({"generator": loss, "discriminator": other})
            self.losses += [loss.detach(), other.detach()]

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(each.parameters(), 2e-4, betas=(0.5, 0.999))
                for each in (self.generator, self.discriminator)
            ]

    module = mode.prepare(Module())
    _lightning_trainer().fit(module, _pictures(mode, side=16, rows=200))
    return _numbers(module, losses=module.losses)


@_loop("fabric", "lightning")
def _fabric(mode: Mode) -> dict[str, Tensor]:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = mode.prepare(_Pictures())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in fabric.setup_dataloaders(_pictures(mode)):
        x, y = mode.lazy(batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return _numbers(model.module, losses=losses)


@_loop("sentence-ranking", "sentence-transformers")
def _sentence_ranking(mode: Mode) -> dict[str, Tensor]:
    import transformers
    from sentence_transformers import SentenceTransformer, models
    from sentence_transformers import losses as ranking

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(80))]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = {word: i for i, word in enumerate(words)}
        transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
        config = tiny.tiny(transformers.BertConfig)
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        encoder = models.Transformer(folder, max_seq_length=16)
    model = SentenceTransformer(modules=[encoder, models.Pooling(tiny.WIDTH)], device="cpu")
    model = mode.prepare(model).train()
    criterion = ranking.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(STEPS):
        texts = [
            [" ".join(f"w{i}" for i in row) for row in torch.randint(80, (ROWS, 12)).tolist()]
            for _ in range(2)
        ]
        features = [mode.lazy(dict(model.tokenize(column))) for column in texts]
        loss = criterion(features, torch.empty(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _numbers(model, losses=losses)


@_loop("timm-mixup-ema", "timm")
def _timm_mixup_ema(mode: Mode) -> dict[str, Tensor]:
    import numpy
    import timm
    import timm.data
    import timm.loss
    import timm.utils

    numpy.random.seed(0)
    model = mode.prepare(timm.create_model("mobilenetv3_small_050", num_classes=10)).train()
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
    criterion = timm.loss.SoftTargetCrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    averaged = timm.utils.ModelEmaV3(model, decay=0.9)
    losses = []
    for step, batch in enumerate(_pictures(mode, side=96)):
        x, y = mixup(*batch)
        x, y = mode.lazy((x, y.to(x.dtype)))
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        averaged.update(model, step=step)
        losses.append(loss.item())
    return _numbers(model, averaged, losses=losses)


@_loop("torchmetrics", "torchmetrics")
def _torchmetrics(mode: Mode) -> dict[str, Tensor]:
    import torchmetrics

    model = mode.prepare(_Pictures())
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(10),
            "f1": torchmetrics.classification.MulticlassF1Score(10),
            "auroc": torchmetrics.classification.MulticlassAUROC(10),
        }
    )
    mean = torchmetrics.MeanMetric()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in _pictures(mode):
        x, y = mode.lazy(batch)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(logits.softmax(1), y)
        mean.update(loss)
    return _numbers(model, metrics=[*metrics.compute().values(), mean.compute()])


def _network(mode: Mode) -> nn.Module:
    widths = (20, 256, 256)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return mode.prepare(nn.Sequential(*layers, nn.Linear(256, 5)))


def _points(mode: Mode, steps: int = STEPS, rows: int = MANY_ROWS) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(rows, 20, dtype=mode.dtype), torch.randint(5, (rows,))) for _ in range(steps)
    ]


@_loop("lbfgs", "torch")
def _lbfgs(mode: Mode) -> dict[str, Tensor]:
    model = _network(mode)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    losses = []
    for batch in _points(mode):
        x, y = mode.lazy(batch)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    return _numbers(model, losses=losses)


@_loop("sam", "torch")
def _sharpness_aware(mode: Mode) -> dict[str, Tensor]:
    model = _network(mode)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for batch in _points(mode):
        x, y = mode.lazy(batch)
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        climbs = []
        with torch.no_grad():
            for parameter in model.parameters():
                climb = parameter.grad * (0.05 / (norm + 1e-12))
                parameter.add_(climb)
                climbs.append(climb)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _numbers(model, losses=losses)


@_loop("swa-update-bn", "torch")
def _weight_averaging(mode: Mode) -> dict[str, Tensor]:
    from torch.optim import swa_utils

    model = mode.prepare(_Pictures())
    averaged = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = _pictures(mode)
    for batch in loader:
        x, y = mode.lazy(batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
    swa_utils.update_bn([mode.lazy(batch) for batch in loader], averaged)
    return _numbers(model, averaged)


@_loop("ppo", "torch")
def _ppo(mode: Mode) -> dict[str, Tensor]:
    policy, critic = _network(mode), _network(mode)
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, 3e-4, eps=1e-5)
    states, _ = _points(mode, 1, 4 * MANY_ROWS)[0]
    seen = []
    with torch.no_grad():
        for state in states.split(MANY_ROWS // 5):  # a step of every environment
            chosen = torch.distributions.Categorical(logits=policy(state))
            action = chosen.sample()
            seen.append((action, chosen.log_prob(action), critic(state).mean(1)))
    actions, before, values = (torch.cat(each) for each in zip(*seen, strict=True))
    returns = values + torch.randn(len(states), dtype=mode.dtype)
    logged = []
    for _ in range(2):
        for index in torch.randperm(len(states)).split(MANY_ROWS):
            batch = states[index], actions[index], before[index], returns[index], values[index]
            s, a, old, target, value = mode.lazy(batch)
            advantage = target - value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            distribution = torch.distributions.Categorical(logits=policy(s))
            ratio = (distribution.log_prob(a) - old).exp()
            with torch.no_grad():
                logged.append(((ratio - 1).abs() > 0.2).float().mean().item())
            clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = clipped - 0.01 * distribution.entropy().mean()
            loss = loss + 0.5 * (critic(s).mean(1) - target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            logged.append(loss.item())
    return _numbers(policy, critic, logged=logged)


@_loop("dcgan", "torch")
def _dcgan(mode: Mode) -> dict[str, Tensor]:
    generator, discriminator = (
        mode.prepare(_Generator()),
        mode.prepare(_discriminator()),
    )
    criterion = nn.BCEWithLogitsLoss()
    optimizers = [
        torch.optim.Adam(each.parameters(), 2e-4, betas=(0.5, 0.999))
        for each in (generator, discriminator)
    ]
    logged = []
    for batch in _pictures(mode, side=16, rows=200):
        real, _ = mode.lazy(batch)
        rows = real.size(0)
        noise = mode.lazy(torch.randn(rows, 16, 1, 1, dtype=mode.dtype))
        label = torch.full((rows,), 1.0, dtype=real.dtype)
        discriminator.zero_grad()
        error_real = criterion(discriminator(real), label)
        error_real.backward()
        fake = generator(noise)
        label.fill_(0.0)
        error_fake = criterion(discriminator(fake.detach()), label)
        error_fake.backward()
        optimizers[1].step()
        generator.zero_grad()
        label.fill_(1.0)
        error = criterion(discriminator(fake), label)
        error.backward()
        optimizers[0].step()
        logged += [error_real.item() + error_fake.item(), error.item()]
    return _numbers(generator, discriminator, logged=logged)


def _solve(field: nn.Module, x: Tensor, tolerance: float) -> Tensor:
    """Integrate from 0 to 1 with Heun's method and a step that adapts to its error."""
    time, step = 0.0, 0.25
    while time < 1.0:
        step = min(step, 1.0 - time)
        first = field(x)
        second = field(x + step * first)
        error = (step / 2 * (second - first)).abs().max().item()
        if error <= tolerance or step < 0.05:
            x = x + step / 2 * (first + second)
            time += step
        step *= min(2.0, max(0.3, 0.9 * (tolerance / (error + 1e-12)) ** 0.5))
    return x


@_loop("ode-solver", "torch")
def _ode_solver(mode: Mode) -> dict[str, Tensor]:
    field = mode.prepare(nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 20)))
    head = mode.prepare(nn.Linear(20, 5))
    optimizer = torch.optim.SGD([*field.parameters(), *head.parameters()], 0.1)
    for batch in _points(mode):
        x, y = mode.lazy(batch)
        optimizer.zero_grad()
        F.cross_entropy(head(_solve(field, x, 1e-2)), y).backward()
        optimizer.step()
    return _numbers(field, head)


class _Codebook(nn.Module):
    """Vectors that follow the mean of what is nearest to them."""

    def __init__(self, n_codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(n_codes, width))
        self.register_buffer("counts", torch.zeros(n_codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        distances = torch.cdist(z, self.codes)
        nearest = distances.argmin(1)
        hot = F.one_hot(nearest, len(self.codes)).type_as(z)
        found = hot @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                total = self.counts.sum()
                weights = (self.counts + 1e-5) / (total + 16e-5) * total
                self.codes.copy_(self.sums / weights.unsqueeze(1))
        return z + (found - z).detach(), F.mse_loss(z, found.detach())


@_loop("vq-vae-ema", "torch")
def _vq_vae(mode: Mode) -> dict[str, Tensor]:
    encoder = mode.prepare(nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 8)))
    decoder = mode.prepare(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 20)))
    codebook = mode.prepare(_Codebook())
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    losses = []
    for x, _ in _points(mode):
        x = mode.lazy(x)
        quantized, commitment = codebook(encoder(x))
        loss = F.mse_loss(decoder(quantized), x) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _numbers(encoder, decoder, codebook, losses=losses)


def _copy_of(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    return made


@_loop("momentum-distillation", "torch")
def _momentum_distillation(mode: Mode) -> dict[str, Tensor]:
    """A teacher that follows its student, as in BYOL and DINO."""
    student = _network(mode)
    teacher = _copy_of(student)
    center = torch.zeros(5, dtype=mode.dtype)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    losses = []
    for x, _ in _points(mode):
        x = mode.lazy(x)
        with torch.no_grad():
            target = teacher(x)
        wanted = ((target - center) / 0.04).softmax(1)
        loss = -(wanted * (student(x + 0.1) / 0.1).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            center = center * 0.9 + target.mean(0) * 0.1
        losses.append(loss.item())
    return _numbers(student, teacher, losses=losses)


def entries() -> Iterator[Entry]:
    """Yield an entry for each loop."""
    for name, (library, loop, tolerance) in LOOPS.items():
        yield Entry(f"loop/{name}", library, loop=loop, tolerance=tolerance)
