# SPDX-License-Identifier: Apache-2.0
"""report(): what the last step ran, program by program, as a user is told it."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila
from koila.messages import layer_table, words
from koila.reporting import report_types, reports
from koila.reporting.report_types import NOTHING_RAN
from koila.running import replay
from limits import there
from oracle import Double
from test_plan import Fails, limited_step, small


def loss(rows: int = 7) -> Tensor:
    w = torch.ones(2, requires_grad=True)
    return (koila.lazy(torch.ones(rows, 2)) * w).tanh().sum()


def here() -> str:
    """The line that calls it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno}"


def ran() -> list[tuple[str, int]]:
    """What made each program of the last step run, and in how many chunks it did."""
    return [(program.what, program.n_chunks) for program in koila.report().programs]


def batch(rows: int = 12) -> Any:
    return koila.lazy(torch.randn(rows, 6), torch.randint(5, (rows,)))


# One program ------------------------------------------------------------------------------------


def test_nothing_has_run_in_this_thread() -> None:
    seen: list[koila.Report] = []
    thread = threading.Thread(target=lambda: seen.append(koila.report()))
    thread.start()
    thread.join()
    (made,) = seen
    assert made.programs == () and made.n_chunks == 0 and made.n_rows is None
    assert str(made) == repr(made) == NOTHING_RAN
    assert "use what it returns" in NOTHING_RAN


def test_whole() -> None:
    line = here()
    loss().backward()
    (program,) = koila.report().programs
    assert (program.what, program.n_chunks, program.n_rows) == ("backward()", 1, None)
    assert program.line == line.replace(line.rsplit(":")[-1], str(int(line.rsplit(":")[-1]) + 1))
    assert program.why == "it certainly fits"
    assert str(program).endswith("whole: it certainly fits; no memory was predicted")
    assert program.n_calls == 3 and program.n_bytes == 2 * 7 * 2 * 4 + 4


def test_batches_of_which_nothing_is_computed() -> None:
    """If a script does not use what lazy() returns, report() shows an earlier step, and says that
    later batches were not used."""
    x, w = torch.ones(8, 4), torch.ones(4, requires_grad=True)
    (koila.lazy(x) * w).sum().backward()
    assert koila.report().n_unused == 0
    for n in range(1, 4):
        koila.lazy(x)
        (x * w).sum().backward()
        assert koila.report().n_unused == n
    last = str(koila.report()).splitlines()[-1]
    assert last.startswith("since then lazy() made 3 batches of which nothing was computed: use")
    (koila.lazy(x) * w).sum().backward()
    assert "since then" not in str(koila.report())


def test_chunks_that_were_asked_for() -> None:
    with koila.config(chunks=3):
        loss().backward()
    (program,) = koila.report().programs
    assert (program.n_chunks, program.n_rows) == (3, 3)
    assert program.n_calls == 3 and program.n_bytes == 2 * 7 * 2 * 4 + 4
    said = "config(chunks=) sets the number of chunks, so no memory was predicted\n"
    assert said in str(program)
    body, barrier = program.stages
    assert (body.number, body.n_calls, body.n_chunks, body.n_rows) == (1, 3, 3, 3)
    assert (barrier.number, barrier.n_chunks, barrier.n_rows) == (2, 1, None)
    with koila.config(chunks=1):
        loss().backward()
    assert koila.report().programs[0].why == "config(chunks=1) asks for it"


@pytest.mark.parametrize(("chunks", "made"), [(None, (1, None)), (1, (1, None)), (2, (2, 4))])
def test_a_read_reports_too(chunks: int | None, made: tuple[int, int | None]) -> None:
    with koila.config(chunks=chunks):
        loss().item()
    assert ran() == [("item()", made[0])]
    assert (koila.report().n_chunks, koila.report().n_rows) == made


READS: dict[str, Callable[[Tensor], Any]] = {
    "item()": lambda x: x.sum().item(),
    "bool()": lambda x: bool(x.sum() > 0),
    "float()": lambda x: float(x.sum()),
    "format()": lambda x: f"{x.sum():.3f}",
    "print()": lambda x: str(x.sum()),
    "numpy()": lambda x: x.sum().numpy(),
    "tolist()": lambda x: (x * 2).tolist(),
    "getitem()": lambda x: x[x > 0],
    "tensor()": lambda x: torch.tensor(x * 2),
}


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_read_is_told_by_its_name(chunks: int | None, name: str) -> None:
    with koila.config(chunks=chunks):
        line = here()
        READS[name](koila.lazy(torch.ones(7, 2)))
    (program,) = koila.report().programs
    assert program.what == name and program.line.startswith(f"{__file__}:")
    assert program.line != line  # it is that of the read itself


@pytest.mark.parametrize("n_bytes", [40_000, 10**9])
def test_memory_limit(n_bytes: int) -> None:
    before = there()
    with koila.config(memory_limit=before + n_bytes):
        loss(2048).backward()
    made = koila.report()
    assert made.bytes_predicted is not None and made.bytes_allowed is not None
    assert 0 < made.bytes_predicted <= made.bytes_allowed <= n_bytes
    assert (made.n_chunks > 1) == (n_bytes == 40_000)
    assert made.bytes_measured is None and "measured: not measured" in str(made)


def test_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = small(), torch.randn(2048, 6).double(), torch.randint(5, (2048,))
    Fails(monkeypatch, 40)
    limited_step(model, x, y)
    made = koila.report()
    assert made.n_tries > 1 and f"at try {made.n_tries}" in str(made)
    assert made.n_rows is not None and made.n_rows <= 40


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt("enough")

    with koila.config(chunks=3):
        loss().backward()
        monkeypatch.setattr(replay.Replay, "differentiate", stop)
        with pytest.raises(KeyboardInterrupt):
            loss().backward()
    assert ran() == [("backward()", 0)]
    assert "failed: KeyboardInterrupt: enough" in str(koila.report())


@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("what", ["item()", "backward()"])
def test_a_call_that_raises_is_told(chunks: int | None, what: str) -> None:
    """Once, also where it ran whole."""
    x = koila.lazy(torch.ones(4, 5, requires_grad=True))
    with koila.config(chunks=chunks):
        total = F.cross_entropy(x * 2, torch.full((4,), 7))
        with pytest.raises(IndexError):
            total.item() if what == "item()" else total.backward()
    assert ran() == [(what, 0)]
    assert "failed: IndexError" in str(koila.report())


def test_a_refusal_is_told() -> None:
    with koila.config(memory_limit=10), pytest.raises(koila.MemoryLimitError):
        loss().item()
    assert ran() == [("item()", 0)]


# What ran whole, and why ------------------------------------------------------------------------


def test_where_a_program_was_cut() -> None:
    """Each part is told, and what was put together where it was cut."""
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU())
    with koila.config(chunks=3):
        x, _ = batch()
        made = model(x)
        line = here()
        doubled = Double.apply(made)
        doubled.pow(2).mean().backward()
    report = koila.report()
    assert report.n_chunks == 3 and report.n_rows == 4
    assert [program.n_chunks for program in report.programs] == [3, 3, 3]
    (whole,) = report.programs[0].whole
    number = int(line.rpartition(":")[2]) + 1
    assert whole.call == "Double.apply" and whole.line == f"{__file__}:{number}"
    assert whole.n_bytes == 12 * 64 * 4
    assert (whole.n_calls, whole.is_recorded) == (0, False)
    told = (
        f"Double.apply ({whole.line}) took 3.0 KiB of the whole batch: it cannot be recorded, and "
    )
    assert told in str(report)


def test_a_program_that_cannot_be_cut() -> None:
    """What runs live is one chunk, whatever ran before."""
    with koila.config(chunks=3):
        loss().backward()
        w = torch.ones(2, requires_grad=True)
        torch.autograd.grad((koila.lazy(torch.ones(7, 2)) * w).sum(), w, create_graph=True)
    assert ran() == [("autograd.grad()", 1)]


def edge_of(w: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(w.sum())


@pytest.mark.parametrize(
    "run, why",
    [
        (lambda out, w: out.sum().backward(create_graph=True), "create_graph=True keeps"),
        (lambda out, w: torch.autograd.grad(out.sum(), w, create_graph=True), "create_graph=True"),
        (
            lambda out, w: torch.autograd.grad(out[0], w, torch.eye(2), is_grads_batched=True),
            "is_grads_batched=True runs it under vmap",
        ),
        (lambda out, w: torch.autograd.grad(out.sum(), out), "inputs= has a value"),
        (lambda out, w: torch.autograd.backward([out.sum(), edge_of(w)]), "other tensors too"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_runs_whole_is_told_and_logged(
    run: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with its line and its reason."""
    with koila.config(chunks=3), caplog.at_level(logging.WARNING, logger="koila"):
        for _ in range(2):
            w = torch.ones(2, requires_grad=True)
            run(koila.lazy(torch.ones(7, 2)) * w, w)
    (whole,) = koila.report().programs[-1].whole
    assert why in whole.why and whole.n_calls > 0
    assert whole.line.startswith(__file__)
    (record,) = caplog.records
    assert f"({whole.line}), since {whole.why}" in record.getMessage()


def test_the_check_of_a_distribution_is_told_as_such() -> None:
    with koila.config(chunks=3):
        mean = koila.lazy(torch.ones(7, 2)) * torch.ones(2, requires_grad=True)
        torch.distributions.Normal(mean, 1.0, validate_args=True)
    assert ran() == [("the check of a distribution's arguments", 3)] * 2


def test_a_call_that_raised_is_told_with_those_before_it() -> None:
    with koila.config(chunks=1):
        x = koila.lazy(torch.ones(4, 5)) * 2
        total = F.cross_entropy(x.tanh(), torch.full((4,), 7))
        with pytest.raises(IndexError) as raised:
            total.item()
    assert "recorded at call 2," in str(raised.value.__notes__)
    assert "failed: IndexError after 2 calls" in str(koila.report())


@pytest.mark.parametrize(
    "left, right, texts",
    [
        (64 * 2**20, 64 * 2**20 - 1024, ("64.000 MiB", "63.999 MiB")),
        (2**20, 3 * 2**20, ("1.0 MiB", "3.0 MiB")),
        (2048, 2047, ("2.000 KiB", "1.999 KiB")),
        (5, 5, ("5 bytes", "5 bytes")),
    ],
)
def test_two_sizes_that_differ_look_it(left: float, right: float, texts: tuple[str, str]) -> None:
    assert words.sizes(left, right) == texts


def test_barriers_are_told_with_their_bytes() -> None:
    with koila.config(chunks=3):
        x, _ = batch()
        h = nn.Linear(6, 64)(x)
        line = here()
        ranked = torch.sort(h, dim=0).values
        ranked.mean().backward()
    (program,) = koila.report().programs
    assert program.n_chunks == 3
    (whole,) = program.whole
    assert whole.call == "sort" and "every sample depends on the others" in whole.why
    assert whole.line == f"{__file__}:{int(line.rpartition(':')[2]) + 1}"
    assert whole.n_bytes == 12 * 64 * (4 + 8) + 4  # its mean is taken there


def test_what_follows_a_barrier_is_told_with_it() -> None:
    with koila.config(chunks=3):
        x, _ = batch()
        values = torch.linalg.svdvals(nn.Linear(6, 5)(x))
        (values[:, None].expand(5, 1000) * 2).mean().backward()
    (program,) = koila.report().programs
    assert program.n_chunks == 3
    (whole,) = program.whole
    assert whole.call == "linalg_svdvals" and "no rule for" in whole.why
    assert whole.n_bytes == 5 * 4 + 5 * 1000 * 4 + 4 and whole.n_calls == 5


def test_a_write_that_makes_all_whole() -> None:
    with koila.config(chunks=3):
        h = koila.lazy(torch.randn(6, 6)) @ torch.randn(6, 6, requires_grad=True)
        mean = h.mean()
        line = here()
        h.diagonal().fill_(0.5)
        (h * mean).sum().backward()
    (program,) = koila.report().programs
    assert program.n_chunks == 1
    (whole,) = program.whole
    assert whole.call == "fill_" and whole.why == program.why
    assert whole.line == f"{__file__}:{int(line.rpartition(':')[2]) + 1}"


def test_nothing_that_has_rows() -> None:
    with koila.config(chunks=3):
        koila.lazy(torch.ones(7), batch=None).sum().item()
    (program,) = koila.report().programs
    assert (program.n_chunks, program.why) == (1, "nothing in it has samples")


# A step -----------------------------------------------------------------------------------------


def test_every_program_of_a_step() -> None:
    """A teacher, a read, the backward, and a metric after it."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with koila.config(chunks=3):
        for _ in range(3):
            x, y = batch()
            with torch.no_grad():
                teacher = model(x)
            optimizer.zero_grad()
            out = model(x)
            error = F.cross_entropy(out, y) + F.mse_loss(out, teacher)
            error.item()
            error.backward()
            optimizer.step()
            (out.argmax(1) == y).float().mean().item()
            whats = ["the end of a block without gradients", "item()", "backward()", "item()"]
            assert ran() == [(what, 3) for what in whats]


def test_nothing_pending_is_not_a_run() -> None:
    """An optimizer's step runs what is pending, and here nothing is."""
    w = torch.ones(2, requires_grad=True)
    with koila.config(chunks=3):
        total = (koila.lazy(torch.ones(7, 2)) * w).sum()
        total.backward()
        torch.optim.SGD([w]).step()
    total.item()
    assert ran() == [("backward()", 3)]


@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_two_backwards_with_the_graph_retained(chunks: int | None) -> None:
    with koila.config(chunks=chunks):
        total = loss()
        total.backward(retain_graph=True)
        total.backward()
    assert [what for what, _ in ran()] == ["backward()", "backward()"]
    assert koila.report().n_chunks == (chunks or 1)


def test_parts_of_an_accumulated_batch_are_one_step() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with koila.config(chunks=3):
        for step in range(3):
            for _ in range(4):
                x, y = batch()
                F.cross_entropy(model(x), y).backward()
            if step > 0:  # that there is an optimizer is known when it has stepped
                assert ran() == [("backward()", 3)] * 4
            optimizer.step()
            optimizer.zero_grad()


def test_two_optimizers_that_share_a_batch() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
    with koila.config(chunks=2):
        for _ in range(2):
            x, _ = batch()
            for optimizer in optimizers:
                second(first(x)).pow(2).mean().backward()
                optimizer.step()
        assert ran() == [("backward()", 2)] * 2


def test_a_batch_made_lazy_once_and_for_all() -> None:
    """A step begins where the optimizer steps again."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch()
    for chunks in (2, 3, 4):
        with koila.config(chunks=chunks):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert ran() == [("backward()", chunks)]


def test_without_an_optimizer_a_batch_is_a_step() -> None:
    for chunks in (4, 3, 2):
        with koila.config(chunks=chunks):
            loss(100 * chunks).backward()
            assert ran() == [("backward()", chunks)]


def test_gradients_of_another_model_are_not_of_this_step() -> None:
    """They wait for an optimizer that has stepped, and this backward gives it none."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for chunks in (4, 3):
        with koila.config(chunks=chunks):
            loss(100 * chunks).backward()
            assert ran() == [("backward()", chunks)]


def test_the_last_step_is_told_until_another_runs_something() -> None:
    with koila.config(chunks=3):
        loss().backward()
    pending = loss()
    assert ran() == [("backward()", 3)]
    pending.backward()
    assert ran() == [("backward()", 1)]


def test_a_step_without_anything_lazy_is_told() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for context in (koila.config(chunks=3), koila.off()):
        with context:
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert (koila.report().n_chunks == 0) == (context is not None and not koila.is_lazy(x))
    assert str(koila.report()) == NOTHING_RAN


def test_a_step_that_never_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = koila.lazy(torch.ones(7, 2))
    for _ in range(report_types.MOST_PROGRAMS + 10):
        (x * 2).sum().item()
    made = koila.report()
    assert len(made.programs) == report_types.MOST_PROGRAMS
    assert len(str(made).splitlines()) < 20


def test_reads_that_are_alike_are_told_once() -> None:
    """As those of a matching, which reads the costs of one image after the other."""
    with koila.config(memory_limit=there() + 2**20):
        costs = koila.lazy(torch.ones(30, 4)) * 2
        costs.sum().item()
        for i in range(30):
            costs[i].numpy()
        costs.sum().item()
    first, before, reads, whole, after, *_ = str(koila.report()).splitlines()
    assert first == "the last step ran 32 passes", "none is left out"
    assert before.startswith("item()") and after.startswith("item()")
    assert reads.startswith("30 times: numpy() at") and whole.startswith("    whole: __getitem__")


def test_a_thread_has_its_own() -> None:
    with koila.config(chunks=3):
        loss().backward()
        thread = threading.Thread(target=lambda: loss().backward())
        thread.start()
        thread.join()
        assert ran() == [("backward()", 3)]


def test_it_reads_well() -> None:
    with koila.config(memory_limit=there() + 40_000):
        loss(2048).backward()
    first, second, *rest = str(koila.report()).splitlines()
    *shown, hint = repr(koila.report()).splitlines()
    assert shown == [first, second, *rest]
    assert hint.startswith("(print() leaves this line out; to save it: Path('report.txt').write")
    assert first == "the last step ran 1 pass"
    assert second.startswith(f"backward() at {__file__}:")
    chunks = r"\d+ chunks of \d+ samples"
    assert re.search(rf": 3 calls with 32.0 KiB of results, in {chunks}$", second)
    wanted = (
        r"    whole needs .*iB; predicted [\d.]+ KiB of [\d.]+ KiB left, measured: not measured; "
        r"least limit that works: [\d.]+ .iB",
        rf"    part 1: 3 calls in {chunks}, 1 forward, 1 backward",
        "    part 2: adds up the results of the chunks",
    )
    assert rest[3].startswith("layer ") and rest[4].startswith(__file__)
    for line, pattern in zip(rest[:3], wanted, strict=True):
        assert re.fullmatch(pattern, line)


def test_what_leaves_is_told_without_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """However little is pending: what is computed from the result may be large."""
    net = torch.nn.Linear(4, 3)
    with caplog.at_level(logging.WARNING, logger="koila"):
        for _ in range(2):
            found = torch.func.vmap(net)(koila.lazy(torch.ones(6, 4)))
            assert type(found) is torch.Tensor
    (record,) = caplog.records
    assert "torch.func.vmap cannot be recorded" in record.getMessage()
    assert "test_report.py" in record.getMessage()
    (told,) = koila.report().programs
    assert "torch.func" in told.why
    with koila.config(chunks=1), caplog.at_level(logging.WARNING, logger="koila"):
        caplog.clear()
        torch.func.vmap(net)(koila.lazy(torch.ones(6, 4)))
    assert not caplog.records, "one chunk was asked for"


def test_a_backward_of_a_framework_has_the_line_of_the_script() -> None:
    """A read has the line that reads, also in a library, whose files have its package's name."""
    scope: dict[str, Any] = {}
    library = "def fit(loss):\n    loss.item()\n    loss.backward()\n"
    exec(compile(library, "/env/lib/site-packages/frame/work.py", "exec"), scope)
    scope["fit"](loss(4))
    at = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    lines = {ran.what: ran.line for ran in koila.report().programs}
    assert lines["item()"] == "frame/work.py:2"
    assert lines["backward()"] == f"{__file__}:{at}"


def test_no_tensor_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """What is told are texts and numbers."""
    with koila.config(chunks=3), caplog.at_level(logging.ERROR, logger="koila"):
        x, _ = batch()
        Double.apply(nn.Linear(6, 5)(x)).sum().backward()
    plain = (str, int, float, type(None))
    told = (report_types.ProgramReport, report_types.Stage, report_types.Whole, layer_table.Layer)
    seen: list[object] = [*koila.report().programs]
    while seen:
        one = seen.pop()
        assert isinstance(one, (*plain, *told, tuple))
        seen += one if isinstance(one, tuple) else vars(one).values() if type(one) in told else ()


def test_a_change_of_chunks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO once for each way in which a line's program runs; at DEBUG each program."""
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        x, y = koila.lazy(torch.randn(1000, 6), torch.randint(0, 5, (1000,)))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    caplog.set_level(logging.INFO, "koila")
    for limit in (None, 1800 * 2**10, 1800 * 2**10, 900 * 2**10):
        with koila.config(memory_limit=None if limit is None else there() + limit):
            step()
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    found = [
        re.fullmatch(
            r"step \d+ \(.*\): (\d+) chunks? of \d+.*, [\d.]+ .iB of [\d.]+ .iB, 1 forward", text
        )
        for text in told
    ]
    assert len(told) == 2 and all(found), told
    first, second = (int(match[1]) for match in found if match is not None)
    assert 1 < first < second
    caplog.set_level(logging.DEBUG, "koila")
    step()
    (text,) = [one.getMessage() for one in caplog.records if one.levelno == logging.DEBUG]
    assert re.match(r"step \d+: backward\(\) at .*whole", text)


@pytest.mark.parametrize(
    ("n", "noun", "text"),
    [
        (1, "call", "1 call"),
        (2, "call", "2 calls"),
        (3, "pass", "3 passes"),
        (0, "batch", "0 batches"),
    ],
)
def test_numbers_of_things(n: int, noun: str, text: str) -> None:
    assert words.count(n, noun) == text


def test_what_reads_an_attribute_is_named_as_it_is() -> None:
    """koila replaces some attributes of tensors by properties, which have no name of their own."""
    assert reports.call_of(torch.Tensor.data.__get__) == "data()"
    assert reports.call_of(torch.Tensor.grad.__get__) == "grad()"


def test_the_least_limit_of_a_first_step_is_enough_for_the_next() -> None:
    """It includes the state that the optimizer makes after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(2000, 128)

    def train() -> float:
        optimizer.zero_grad()
        model(koila.lazy(x)).pow(2).mean().backward()
        least = koila.report().programs[-1].least_limit
        assert least is not None
        optimizer.step()
        return least

    with koila.config(memory_limit=there() + 8 * 2**20):
        least = train()
        assert train() == pytest.approx(least, rel=0.02)
    with koila.config(memory_limit=int(least)):
        train()
